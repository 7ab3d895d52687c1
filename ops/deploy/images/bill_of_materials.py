"""`python -m ops.deploy.images.bill_of_materials LOCK...`: print what this Python has installed, as CycloneDX.

An image has it as `/opt/tidepool/sbom.cdx.json`. It names each package with its version and license, and the SHA-256 of
its wheel where one of the locks has it. The same packages give the same bytes.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

APPLICATION = "tidepool"
_PIN = re.compile(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})")
_LICENSE_CLASSIFIER = "License :: "


def bill_of(installed: Iterable[Distribution], digests: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The bill of materials of these packages. `digests`: the SHA-256 of wheels by name and version."""
    components = {each["name"]: each for each in (_component(one, digests) for one in installed)}
    application = components.pop(APPLICATION, None)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {} if application is None else {"component": application | {"type": "application"}},
        "components": [components[name] for name in sorted(components)],
    }


def digests_of(locks: Iterable[str]) -> dict[tuple[str, str], str]:
    """The SHA-256 of each wheel of these locks, by name and version."""
    found = (match.groups() for lock in locks for match in _PIN.finditer(lock))
    return {(_normalized(name), version): digest for name, version, digest in found}


def _component(package: Distribution, digests: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    name, version = _normalized(package.name), package.version
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    digest = digests.get((name, version))
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        **({"hashes": [{"alg": "SHA-256", "content": digest}]} if digest else {}),
        **({"licenses": licenses} if (licenses := list(_licenses(package))) else {}),
    }


def _licenses(package: Distribution) -> Iterator[dict[str, Any]]:
    """An SPDX expression where the package has one, else the licenses that it is classified by."""
    if expressions := package.metadata.get_all("License-Expression"):
        yield {"expression": expressions[0]}
        return
    classifiers = package.metadata.get_all("Classifier") or []
    for classifier in sorted(set(classifiers)):
        if classifier.startswith(_LICENSE_CLASSIFIER):
            yield {"license": {"name": classifier.rpartition(" :: ")[2]}}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(locks: Sequence[str]) -> None:
    """Print the bill of this Python's packages."""
    digests = digests_of(Path(lock).read_text(encoding="utf-8") for lock in locks)
    print(json.dumps(bill_of(distributions(), digests), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
