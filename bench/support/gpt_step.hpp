// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What a step of the GPT example allocates.
#pragma once

#include <heddle/memory/logging.hpp>
#include <heddle/recompute/chain.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../../examples/gpt/data.hpp"
#include "../../examples/gpt/fine.hpp"
#include "../../examples/gpt/model.hpp"

namespace bench {

/// The example's model; `fine`: eight layers for each block of it.
struct gpt_model {
  gpt_model(const gpt::shape& dims, bool fine) : model{dims, 1}, cut{model} {
    if (fine)
      layers = cut.list();
    else
      model.for_each_layer([&](auto& l, std::string name) { layers.emplace_back(l, std::move(name)); });
  }
  gpt::model<float> model;
  gpt::fine_layers<float> cut;
  std::vector<heddle::recompute::layer> layers;
};

/// The sizes of its layers, all equally fast.
inline std::vector<heddle::recompute::layer_cost> gpt_costs(const gpt::shape& dims, bool fine) {
  const gpt_model m{dims, fine};
  std::vector<heddle::recompute::layer_cost> out;
  for (const auto& l : m.layers) out.push_back(l.cost());
  return out;
}

/// The blocks of one step under a policy, recorded while it runs.
template <class Policy>
std::vector<heddle::lifetime> gpt_step(const gpt::shape& dims, bool fine, const Policy& policy) {
  gpt_model m{dims, fine};
  gpt::sequences text;
  for (std::size_t b = 0; b < dims.batch; ++b) {
    text.set(b, std::vector<std::int32_t>(dims.context + 1, 1), 0, dims.context);
  }
  heddle::logging memory{heddle::host_resource{}};
  heddle::recompute::chain chain{policy, memory, m.layers};
  m.model.shared().targets = text.targets.data();
  (void)chain.forward(text.inputs.data());
  const double one = 1;
  chain.backward(&one, nullptr);
  return memory.lifetimes();
}

}  // namespace bench
