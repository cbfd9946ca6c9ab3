# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# word2vec.py TEXT skipgram|cbow THREADS [SEED FILE]: seconds that gensim takes for one epoch over a text, read by
# corpus_file, of the clock and of processors; with SEED for five epochs, and the vectors go to FILE
import sys
import time

from gensim.models import Word2Vec

path, skipgram, threads = sys.argv[1], int(sys.argv[2] == "skipgram"), int(sys.argv[3])
seed, epochs = (int(sys.argv[4]), 5) if len(sys.argv) > 4 else (1, 1)
model = Word2Vec(vector_size=100, window=5, negative=5, sample=1e-4, min_count=5, workers=threads, sg=skipgram, hs=0,
                 alpha=0.025 if skipgram else 0.05, seed=seed)
model.build_vocab(corpus_file=path)
start, processors = time.time(), time.process_time()
model.train(corpus_file=path, total_examples=model.corpus_count, total_words=model.corpus_total_words, epochs=epochs)
print("%.4f %.4f" % (time.time() - start, time.process_time() - processors))
if len(sys.argv) > 5:
    model.wv.save_word2vec_format(sys.argv[5], binary=True)
