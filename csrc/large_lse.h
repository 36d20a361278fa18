// One number of attention that host and device code share; no torch here.
#pragma once

namespace fused_remat {

// The log of a sum keeps too few digits beside scores of this size: log(4) vanishes beside a mask
// of -3.4e38. Rows whose lse is beyond it get a `correction`, so that probabilities = exp(scores -
// lse - correction).
constexpr double kLargeLse = 64.0;

}  // namespace fused_remat
