#include "mha_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "heads.h"

namespace fused_remat {

using at::Tensor;

namespace {

// Operands that are one vector per call.
struct Vector {
  MhaOperand name;
  const OptionalTensor& operand;
};

std::array<Vector, 7> vectors_of(const MhaOperands& o) {
  return {
      {{kBout, o.b_out},
       {kBiasK, o.bias_k},
       {kBiasV, o.bias_v},
       {kNormWeight, o.norm_weight},
       {kNormBias, o.norm_bias},
       {kQNorm, o.q_norm},
       {kKNorm, o.k_norm}}};
}

}  // namespace

MhaGradients::MhaGradients(const MhaProblem& problem, const Wanted& wanted, const Wanted& unrounded)
    : MhaPass(problem),
      wanted_(wanted),
      unrounded_(unrounded),
      wide_(problem.operands.query.options().dtype(problem.precision.accumulate)) {
  const MhaOperands& o = p_.operands;
  const OptionalTensor inputs[] = {o.query, o.key, o.value};
  int64_t first_row = 0;
  for (int part = 0; part < kParts; ++part) {
    part_wanted_[part] = is_part_wanted(part);
    make_projection(part, first_row);
    make_input(part, inputs[part]);
    first_row += sizes_.part_columns(part);
  }
  if (wanted_[kWout]) gradients_[kWout] = empty_gradient(kWout, o.w_out);
  for (const Vector& vector : vectors_of(o))
    if (wanted_[vector.name]) sums_[vector.name] = at::zeros(vector.operand->sizes(), wide_);
  for (int i = 0; i < kMhaAdapters; ++i)
    adapter(i).begin_gradients(wanted_[factor_a(i)], wanted_[factor_b(i)]);
}

at::ScalarType MhaGradients::dtype_of(int operand, const Tensor& of) const {
  return unrounded_[operand] ? accumulation_dtype(of.scalar_type()) : of.scalar_type();
}

Tensor MhaGradients::empty_gradient(int operand, const Tensor& of) const {
  return at::empty(of.sizes(), of.options().dtype(dtype_of(operand, of)));
}

bool MhaGradients::is_part_wanted(int part) const {
  const int input = p_.projections[part].input;
  bool wanted = wanted_[kQuery + input] || wanted_[p_.packed_weight() ? kWq : kWq + part] ||
                (p_.projections[part].bias && wanted_[p_.packed_bias() ? kBq : kBq + part]) ||
                wanted_[factor_a(part)] || wanted_[factor_b(part)];
  if (p_.inputs[input].normalized) wanted = wanted || wanted_[kNormWeight] || wanted_[kNormBias];
  if (part == kQ) return wanted || wanted_[kQNorm];
  if (part == kK) return wanted || wanted_[kKNorm] || wanted_[kBiasK];
  return wanted || wanted_[kBiasV];
}

// The gradients of weight and bias, whole even where an operand is packed or lies by heads.
void MhaGradients::make_projection(int part, int64_t first_row) {
  const MhaOperands& o = p_.operands;
  const OptionalTensor weights[] = {o.w_q, o.w_k, o.w_v}, biases[] = {o.b_q, o.b_k, o.b_v};
  const int64_t rows = sizes_.part_columns(part);
  for (const bool is_bias : {false, true}) {
    const bool packed = is_bias ? p_.packed_bias() : p_.packed_weight();
    const OptionalTensor& own = (is_bias ? biases : weights)[packed ? 0 : part];
    const int operand = (is_bias ? kBq : kWq) + (packed ? 0 : part);
    if (!own || !wanted_[operand]) continue;
    Tensor& gradient = gradients_[operand];
    if (!gradient.defined()) gradient = empty_gradient(operand, *own);
    if (is_bias) {
      bias_gradients_[part] = gradient.flatten().narrow(0, packed ? first_row : 0, rows);
      bias_sums_[part] = at::zeros({rows}, wide_);
    } else {
      weight_gradients_[part] = packed ? gradient.narrow(0, first_row, rows)
                                       : gradient.view({rows, p_.projections[part].features()});
    }
  }
}

// The sum over groups lives in the gradient itself where that is as wide as a sum must be.
void MhaGradients::make_input(int part, const OptionalTensor& input) {
  const bool through_norm = part == kQ && p_.norm && (wanted_[kNormWeight] || wanted_[kNormBias]);
  if (!input || !(wanted_[kQuery + part] || through_norm)) return;
  const int64_t columns = input->size(2);
  if (wanted_[kQuery + part]) {
    gradients_[kQuery + part] = p_.empty_rows(part, columns, input->options());
    input_rows_[part] = p_.rows_of(gradients_[kQuery + part], part);
  }
  const bool direct =
      input_rows_[part].defined() && input_rows_[part].scalar_type() == p_.precision.accumulate;
  input_sums_[part] = direct ? input_rows_[part]
                             : at::empty({sizes_.batch * sizes_.part_length(part), columns}, wide_);
  input_sums_[part].zero_();
}

Adapter& MhaGradients::adapter(int i) {
  return i == kAdaptOut ? static_cast<Adapter&>(out_adapter_) : adapters_[i];
}

void MhaGradients::finish_sums() {
  for (const Vector& vector : vectors_of(p_.operands))
    if (wanted_[vector.name])
      gradients_[vector.name] = sums_[vector.name].to(dtype_of(vector.name, *vector.operand));
  for (int part = 0; part < kParts; ++part)
    if (bias_sums_[part].defined()) bias_gradients_[part].copy_(bias_sums_[part]);
  for (int i = 0; i < kMhaAdapters; ++i) {
    const AdapterFactors& factors = p_.operands.adapters[i];
    const Adapter& made = adapter(i);
    const int a = factor_a(i), b = factor_b(i);
    if (made.da.defined()) gradients_[a] = made.da.to(dtype_of(a, *factors.a));
    if (made.db.defined()) gradients_[b] = made.db.to(dtype_of(b, *factors.b));
  }
}

}  // namespace fused_remat
