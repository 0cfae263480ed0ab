#!/usr/bin/env python3
"""Make dist/ of the commit that is checked out: wheel, sdist, bill of materials (CycloneDX), and their SHA-256 sums.

    make wheel      # makes build/release-env, and runs this in it

The same commit gives the same bytes with the same Python: times are the commit's, modes and owners do not depend on who builds.
What is not committed is not in it. The wheel that the sdist builds has to be the same as that of the checkout.

The bill of materials says what an installation without extras has: each dependency in the version of requirements/lock.txt, and
Plotly's script, which is in the wheel itself. Ranges, as the wheel's metadata have them, could not be compared with known faults;
which framework there is, and which version of it, is the user's choice.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLOTLY = "elasticdl/report/plotly/plotly-basic.min.js.gz"


class ReleaseError(Exception):
    """What is wrong, and what would be right."""


def main() -> int:
    epoch = git("log", "-1", "--format=%ct").decode().strip()
    os.environ["SOURCE_DATE_EPOCH"] = epoch
    os.umask(0o022)  # a wheel has the modes of the files that are written for it
    if git("status", "--porcelain"):
        print("release: what is not committed is not in it", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        tree, made = Path(scratch, "tree"), Path(scratch, "dist")
        export(tree)
        sdist = build(tree, "sdist", made)
        normalise(sdist, int(epoch))
        wheel = build(tree, "wheel", made)
        compare(wheel, build(unpack(sdist, Path(scratch, "unpacked")), "wheel", Path(scratch, "again")))
        bill = made / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
        bill.write_text(bill_of_materials(tree, wheel, Path(scratch, "core")))
        sums = "".join(
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made.iterdir())
        )
        (made / "SHA256SUMS").write_text(sums)
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(made, ROOT / "dist")
    for path in sorted((ROOT / "dist").iterdir()):
        print(f"{path.stat().st_size:>9}  {path.relative_to(ROOT)}")
    return 0


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], stdout=subprocess.PIPE, check=True).stdout


def export(tree: Path) -> None:
    """The commit's files, with modes that do not depend on the umask of whoever has checked them out."""
    tree.mkdir()
    archive = git("-c", "tar.umask=0022", "archive", "--format=tar", "HEAD")
    subprocess.run(["tar", "-xp", "--no-same-owner", "-C", str(tree)], input=archive, check=True)


def build(tree: Path, kind: str, into: Path) -> Path:
    """One of the hooks that every front end of builds calls; setuptools is the one of this environment."""
    into.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(into)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"the {kind} can't be built:\n{done.stderr}")
    for left in (*tree.glob("*.egg-info"), tree / "build"):  # what one build leaves must not get into the next
        shutil.rmtree(left, ignore_errors=True)
    return into / done.stdout.splitlines()[-1]


def normalise(sdist: Path, epoch: int) -> None:
    """setuptools writes a wheel by SOURCE_DATE_EPOCH, and an sdist by the clock and with its builder's name."""
    files = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=files, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(files.getvalue(), mtime=epoch))


def unpack(sdist: Path, into: Path) -> Path:
    into.mkdir()
    subprocess.run(["tar", "-xpf", str(sdist), "--no-same-owner", "-C", str(into)], check=True)
    (tree,) = into.iterdir()
    return tree


def compare(wheel: Path, other: Path) -> None:
    if wheel.name != other.name or wheel.read_bytes() != other.read_bytes():
        unlike = ", ".join(sorted({str(name) for name, *_ in entries(wheel) ^ entries(other)}))
        raise ReleaseError(f"the sdist builds another {wheel.name} than the checkout; these differ: {unlike}")


def entries(wheel: Path) -> set[tuple[object, ...]]:
    with zipfile.ZipFile(wheel) as files:
        return {(each.filename, each.CRC, each.external_attr, each.date_time) for each in files.infolist()}


def bill_of_materials(tree: Path, wheel: Path, core: Path) -> str:
    """Of a fresh environment with the wheel and what it needs."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(core)], check=True)
    python = str(core / "bin/python")
    install = [*pip, "--python", python, "install", "--quiet", "-c", str(tree / "requirements/lock.txt"), str(wheel)]
    subprocess.run(install, check=True)
    options = ["--output-reproducible", "--pyproject", str(tree / "pyproject.toml"), "--mc-type", "library", "-o", "-"]
    made = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", "environment", *options, python], stdout=subprocess.PIPE, check=True
    )
    bill = json.loads(made.stdout)
    # cyclonedx-py does not know a version that setuptools reads from the package. There is no purl: PyPI's elasticdl is another one.
    bill["metadata"]["component"]["version"] = wheel.name.split("-")[1]
    text = with_plotly(bill, (tree / PLOTLY).read_bytes())
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    wrong = JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text)
    if wrong:
        raise ReleaseError(f"the bill of materials is none of CycloneDX {bill['specVersion']}: {wrong}")
    return text


def with_plotly(bill: dict, script: bytes) -> str:
    """Its version is the one that the script says of itself."""
    said = re.search(r"plotly\.js \(basic - minified\) v([\d.]+)", gzip.decompress(script)[:500].decode())
    if not said:
        raise ReleaseError(f"{PLOTLY} does not say its version in its first lines")
    purl = f"pkg:npm/plotly.js-basic-dist-min@{said[1]}"
    plotly = {
        "type": "library",
        "bom-ref": purl,
        "name": "plotly.js-basic-dist-min",
        "version": said[1],
        "licenses": [{"license": {"id": "MIT"}}],
        "purl": purl,
    }
    bill["components"].append(plotly)
    root = bill["metadata"]["component"]["bom-ref"]
    (needs,) = [each for each in bill["dependencies"] if each["ref"] == root]
    needs["dependsOn"] = sorted([*needs.get("dependsOn", []), purl])
    bill["dependencies"].append({"ref": purl})
    return json.dumps(bill, indent=2) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        sys.exit(1)
    except subprocess.CalledProcessError as error:
        print(f"release: {' '.join(error.cmd[:5])} ... ended with {error.returncode}", file=sys.stderr)
        sys.exit(1)
