// Creation of autograd nodes, whose ownership changed between torch releases (shared_ptr, then
// intrusive_ptr).
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/node.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace fused_remat {

template <class T, class Handle = decltype(torch::autograd::Edge::function), class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<Handle, std::shared_ptr<torch::autograd::Node>>) {
    // deleteNode frees long chains of nodes without recursion; found by its argument, as newer
    // releases lack it.
    return std::shared_ptr<T>(
        new T(std::forward<Args>(args)...),
        [](typename Handle::element_type* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

}  // namespace fused_remat
