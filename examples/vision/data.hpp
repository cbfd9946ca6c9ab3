// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// Images and labels in the idx format of MNIST, gzipped or not.

#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace vision {

/// An idx file: unsigned bytes in one or three dimensions.
struct idx {
  std::vector<std::uint8_t> bytes;
  std::size_t items = 0;
  std::size_t item_bytes = 1;

  /// Throws: runtime_error naming the file if it can't be read or is no idx file of bytes.
  static idx read(const std::string& path) {
    const std::unique_ptr<gzFile_s, int (*)(gzFile)> file{gzopen(path.c_str(), "rb"), gzclose};
    if (!file) throw std::runtime_error("cannot read " + path);
    const auto take = [&](void* to, std::size_t n) {
      if (gzread(file.get(), to, static_cast<unsigned>(n)) != static_cast<int>(n))
        throw std::runtime_error(path + " ends early or is damaged");
    };
    const auto number = [&] {
      std::uint8_t b[4];
      take(b, 4);
      return std::size_t{b[0]} << 24 | std::size_t{b[1]} << 16 | std::size_t{b[2]} << 8 | std::size_t{b[3]};
    };
    const std::size_t magic = number();
    if (magic != 0x801 && magic != 0x803) throw std::runtime_error(path + " is no idx file of bytes");
    idx out;
    out.items = number();
    for (std::size_t d = 1; d < (magic & 255); ++d) out.item_bytes *= number();
    if (out.items > 10'000'000 || out.item_bytes > 1'000'000 || out.items * out.item_bytes > 1'000'000'000)
      throw std::runtime_error(path + " says that it holds " + std::to_string(out.items) + " items of " +
                               std::to_string(out.item_bytes) + " bytes");
    out.bytes.resize(out.items * out.item_bytes);
    take(out.bytes.data(), out.bytes.size());
    return out;
  }
};

/// Pictures as floats of mean about 0, and their classes.
struct pictures {
  std::size_t pixels = 0;
  std::vector<float> images;  // row by row
  std::vector<std::uint8_t> labels;

  pictures(const std::string& image_file, const std::string& label_file) {
    const idx i = idx::read(image_file), l = idx::read(label_file);
    if (i.items != l.items || l.item_bytes != 1 || i.items == 0)
      throw std::runtime_error(image_file + " holds " + std::to_string(i.items) + " images and " + label_file + " " +
                               std::to_string(l.items) + " labels");
    pixels = i.item_bytes;
    labels = l.bytes;
    for (const std::uint8_t c : labels) {
      if (c > 9) throw std::runtime_error(label_file + " has a class above 9");
    }
    images.reserve(i.bytes.size());
    for (const std::uint8_t b : i.bytes) images.push_back(static_cast<float>(b) / 255.0f - 0.286f);
  }

  std::size_t count() const { return labels.size(); }
};

}  // namespace vision
