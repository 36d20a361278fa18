// The gradients of multi-head attention while backward fills them: which of them are asked for,
// where they lie in memory, and the sums that they are rounded from.
#pragma once

#include "mha_pass.h"

namespace fused_remat {

class MhaGradients : protected MhaPass {
 public:
  using Gradients = std::array<at::Tensor, kMhaOperands>;
  using Wanted = std::array<bool, kMhaOperands>;

 protected:
  // The gradients of parameters in `unrounded` have the dtype of the sums.
  MhaGradients(const MhaProblem& problem, const Wanted& wanted, const Wanted& unrounded);
  // Rounds every sum but those of inputs and masks into its gradient.
  void finish_sums();

  const Wanted &wanted_, &unrounded_;
  const at::TensorOptions wide_;
  std::array<bool, kParts> part_wanted_;  // whether any gradient flows through q, k or v
  Gradients gradients_;
  std::array<at::Tensor, kMhaOperands> sums_;  // of what is a vector per call
  // By part, views of gradients: [rows, D] and [rows].
  std::array<at::Tensor, kParts> weight_gradients_, bias_gradients_, bias_sums_;
  std::array<at::Tensor, kParts> input_rows_, input_sums_;  // [B L, D]

 private:
  at::ScalarType dtype_of(int operand, const at::Tensor& of) const;
  at::Tensor empty_gradient(int operand, const at::Tensor& of) const;
  bool is_part_wanted(int part) const;
  void make_projection(int part, int64_t first_row);
  void make_vectors();
  void make_input(int part, const OptionalTensor& input);
  Adapter& adapter(int i);
};

}  // namespace fused_remat
