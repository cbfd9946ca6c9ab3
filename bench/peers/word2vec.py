# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# word2vec.py TEXT skipgram|cbow THREADS: seconds that gensim takes for one epoch over a text,
# read by corpus_file, of the clock and of processors
import sys
import time

from gensim.models import Word2Vec

path, skipgram, threads = sys.argv[1], int(sys.argv[2] == "skipgram"), int(sys.argv[3])
model = Word2Vec(vector_size=100, window=5, negative=5, sample=1e-4, min_count=5, workers=threads, sg=skipgram, hs=0,
                 alpha=0.025 if skipgram else 0.05)
model.build_vocab(corpus_file=path)
start, processors = time.time(), time.process_time()
model.train(corpus_file=path, total_examples=model.corpus_count, total_words=model.corpus_total_words, epochs=1)
print("%.4f %.4f" % (time.time() - start, time.process_time() - processors))
