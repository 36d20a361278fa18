"""Print what an extra of the installed fused_remat needs, one requirement a line, some packages left out.

    python .ci/requirements.py EXTRA [--without NAME]...

pip cannot leave a dependency out; a CPU-only torch must not gain Triton, nor be replaced by what torchvision pins.
"""

import argparse
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "fused-remat"


def collect(extra: str, without: set[str]) -> list[str]:
    """The requirements of the package itself and of `extra`, with the extras that it names in turn."""
    found = []
    for requirement in map(Requirement, requires(PACKAGE) or []):
        marker, requirement.marker = requirement.marker, None
        name = canonicalize_name(requirement.name)
        if name in without or (marker is not None and not marker.evaluate({"extra": extra})):
            continue
        if name == PACKAGE:
            found += [line for inner in sorted(requirement.extras) for line in collect(inner, without)]
        else:
            found.append(str(requirement))
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    print("\n".join(collect(arguments.extra, set(map(canonicalize_name, arguments.without)))))
