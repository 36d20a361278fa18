"""The repeated blocks of a model, found by structure: what one puts `torch.utils.checkpoint` around by hand."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the class that has the most of them in lists of that class alone; empty if there is no such list.

    A list is an nn.ModuleList, or an nn.Sequential of at least two, whose members are of one class and have children
    and parameters; lists inside members of a list (the experts of a block, say) do not count.
    """
    found: dict[type, list[nn.Module]] = defaultdict(list)

    def walk(module: nn.Module) -> None:
        if _is_list_of_blocks(module):
            blocks = list(module.children())
            found[type(blocks[0])] += [block for block in blocks if block not in found[type(blocks[0])]]
            return
        for child in module.children():
            walk(child)

    walk(model)
    return max(found.values(), key=len, default=[])


def _is_list_of_blocks(module: nn.Module) -> bool:
    members = list(module.children())
    least = 1 if isinstance(module, nn.ModuleList) else 2
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(members) >= least
        and len({type(member) for member in members}) == 1
        and not isinstance(members[0], (nn.ModuleList, nn.ModuleDict))  # those have no forward
        and all(list(member.children()) and list(member.parameters()) for member in members)
    )
