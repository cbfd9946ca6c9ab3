// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "../support/catch.hpp"
#include "conformance.hpp"

#include <heddle/core/cuda.cuh>
#include <heddle/mode/hogwild.cuh>

#include <string>
#include <vector>

namespace hd = heddle;

TEST_CASE("core: the cuda backend obeys the laws on the default stream") {
  for (const std::string& failure : heddle_test::backend_failures<hd::cuda>({})) FAIL_CHECK(failure);
}

TEST_CASE("core: the cuda backend obeys the laws on a stream of the caller's") {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  for (const std::string& failure : heddle_test::backend_failures<hd::cuda>({stream})) FAIL_CHECK(failure);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("core: an event orders two streams") {
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) REQUIRE(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  const hd::cuda::queue first{streams[0]}, second{streams[1]};
  CHECK(first != second);
  const std::size_t n = std::size_t{1} << 18;
  {
    heddle_test::array<hd::cuda, std::uint64_t> a(first, n), b(first, n);
    first.synchronize();
    hd::cuda::event done;
    hd::cuda::for_each(n, heddle_test::multiply_index{a.data()}, first);
    done.record(first);
    second.wait(done);
    hd::cuda::copy(a.data(), b.data(), n, second);
    second.synchronize();
    const auto got = b.get();
    CHECK(got.front() == 1);
    CHECK(got.back() == 3 * (n - 1) + 1);
  }
  for (cudaStream_t s : streams) CHECK(cudaStreamDestroy(s) == cudaSuccess);
}

TEST_CASE("core: an event is ready when all work before it is done") {
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) REQUIRE(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  const hd::cuda::queue first{streams[0]}, second{streams[1]};
  const std::size_t n = std::size_t{1} << 18;
  {
    heddle_test::array<hd::cuda, std::uint64_t> a(first, n), b(first, n);
    first.synchronize();
    hd::cuda::event done;
    CHECK(done.ready());  // nothing was recorded
    for (std::uint64_t factor = 1; factor <= 4; ++factor) {
      hd::cuda::for_each(n, heddle_test::multiply_index{a.data()}, first);
      hd::cuda::fill(a.data(), 1, factor, first);
      done.record(first);
      while (!done.ready()) {
      }
      hd::cuda::copy(a.data(), b.data(), n, second);  // nothing else orders the streams
      second.synchronize();
      const auto got = b.get();
      CHECK(got.front() == factor);
      CHECK(got.back() == 3 * (n - 1) + 1);
    }
  }
  for (cudaStream_t s : streams) CHECK(cudaStreamDestroy(s) == cudaSuccess);
}

TEST_CASE("core: CUDA's errors are named", "[host]") {
  const hd::cuda_error e("cuda::copy", cudaErrorInvalidValue);
  CHECK(std::string(e.what()).find("heddle::cuda::copy: cudaErrorInvalidValue") == 0);
  CHECK(e.code() == cudaErrorInvalidValue);
  CHECK_THROWS_AS(hd::cuda::memory{}.allocate({}, 16, 3), hd::argument_error);
  CHECK_THROWS_AS(hd::cuda::memory{}.allocate({}, 16, 512), hd::argument_error);
  CHECK_THROWS_AS(hd::cuda::fill(static_cast<float*>(nullptr), 1, 0.0f, {}), hd::argument_error);
}

TEST_CASE("core: additions by reduction from two streams are all in the sum") {
  cudaStream_t streams[2] = {};
  for (cudaStream_t& s : streams) REQUIRE(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  const hd::cuda::queue first{streams[0]}, second{streams[1]};
  const std::size_t width = 5, count = 700;
  {
    heddle_test::array<hd::cuda, float> table(first, 4 * width), own(first, count * width);
    heddle_test::array<hd::cuda, std::uint32_t> rows(first, count);
    hd::cuda::fill(table.data(), 4 * width, 0.0f, first);
    hd::cuda::fill(own.data(), count * width, 1.0f, first);
    hd::cuda::fill(rows.data(), count, 2u, first);
    first.synchronize();
    hd::red::add_rows(table.data(), rows.data(), own.data(), 2.0f, count, width, first);
    hd::red::add_rows(table.data(), rows.data(), own.data(), -1.0f, count, width, second);
    hd::red::add(table.data(), own.data(), 0.5f, 4 * width, second);
    hd::red::add(table.data(), nullptr, 1.0f, 0, first);
    first.synchronize();
    second.synchronize();
    const auto got = table.get();
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == (i / width == 2 ? 700.5f : 0.5f));
    CHECK_THROWS_AS(hd::red::add(nullptr, own.data(), 1.0f, 1, first), hd::argument_error);
    CHECK_THROWS_AS(hd::red::add_rows(table.data(), nullptr, own.data(), 1.0f, ~std::size_t{0}, 2, first),
                    hd::argument_error);
  }
  for (cudaStream_t s : streams) CHECK(cudaStreamDestroy(s) == cudaSuccess);
}
