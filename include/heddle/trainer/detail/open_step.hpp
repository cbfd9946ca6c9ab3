// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/trainer/detail/checked.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// What a trainer is told of a step before it is taken: which tensors are ready, this rank's samples; and the factors of
// tensors' groups, which may change between steps. Gradients are of type Element.
template <class Element> class open_step {
  template <class Value> using list = std::vector<typename dependent<Value, Element>::type>;

 public:
  // The tensors must outlive this.
  open_step(const std::vector<tensor>& tensors, unused missing)
      : tensors_(tensors), missing_(missing), groups_(tensors.size()) {}
  open_step(const open_step&) = delete;
  open_step& operator=(const open_step&) = delete;

  void groups(std::span<const group_options> options) {
    require_closed("groups");
    for (const group_options& g : options) check_group(g);
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      groups_[i] = tensors_[i].group < options.size() ? options[tensors_[i].group] : group_options{};
  }
  // What a rule is told of tensor i in a step.
  update_context context(std::size_t i, float lr, std::size_t step) const noexcept {
    return {lr * groups_[i].lr_scale, step, groups_[i].decay_scale, tensors_[i].group};
  }

  void begin(const begin_options& o) {
    check_begin(o);
    require_closed("begin");
    open_ = true;
    samples_ = o.samples;
    ready_.assign(tensors_.size(), 0);
  }
  double samples() const noexcept { return samples_; }
  bool is_open() const noexcept { return open_; }
  void require_closed(const char* what) const {
    if (open_)
      throw argument_error(std::string("heddle::data_parallel::") + what + ": a step is open; call step() first");
  }

  // Tensor i is ready; begin() opens the step if none is open. Throws argument_error if there is no tensor i, or if it
  // was ready before.
  template <class Begin> void ready(std::size_t i, Begin&& begin) {
    if (i >= tensors_.size())
      throw argument_error("heddle::data_parallel::ready: tensor " + std::to_string(i) + " of " +
                           std::to_string(tensors_.size()));
    if (!open_) begin();
    if (ready_[i])
      throw argument_error("heddle::data_parallel::ready: tensor \"" + tensors_[i].name +
                           "\" was ready before in this step");
    ready_[i] = 1;
  }

  // Ends the step: tensors that were never ready become zero, then f(i) is called; or argument_error, where that is
  // what to do with them. `zero` says how a tensor's gradient becomes zero.
  template <class Function> void close(Function&& f) {
    close([](const tensor& t) { std::fill_n(static_cast<Element*>(t.gradient), t.count, Element(0.0f)); }, f);
  }
  template <class Zero, class Function> void close(Zero&& zero, Function&& f) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (ready_[i]) continue;
      if (missing_ == unused::error)
        throw argument_error("heddle::data_parallel::step: tensor \"" + tensors_[i].name +
                             "\" was never ready in this step; allowed with unused::treat_as_zero");
      zero(tensors_[i]);
      ready_[i] = 1;
      f(i);
    }
    open_ = false;
  }

 private:
  const std::vector<tensor>& tensors_;
  unused missing_;
  list<group_options> groups_;
  bool open_ = false;
  double samples_ = 1.0;
  list<unsigned char> ready_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
