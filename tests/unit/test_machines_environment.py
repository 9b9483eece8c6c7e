"""Distributions behind modules, from made-up metadata folders on the path; hardware from recorded text."""

import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from onejob.machines import environment, inventory
from onejob.machines.environment import distributions, hardware, parse_cpu, python_version
from onejob.machines.inventory import Gpu


class Site:
    """A folder of installed distributions, alone on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        version: str,
        requires: Sequence[str] = (),
        *,
        top_level: str | None = None,
        files: Sequence[str] = (),
    ) -> Path:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: not-a-header\n")
        record = files or [f"{name.replace('-', '_')}/__init__.py"]
        (info / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in [*record, f"{info.name}/METADATA"]))
        if top_level is not None:
            (info / "top_level.txt").write_text(top_level)
        return info


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return Site(tmp_path)


def test_only_what_the_modules_reach(site: Site) -> None:
    site.install("alpha", "1.0", ["beta>=1"])
    site.install("beta", "2.0", ["gamma"])
    site.install("gamma", "3.0", ["alpha"])
    site.install("other", "9.0")
    assert distributions(["alpha.sub.module", "json", "os"]) == {"alpha": "1.0", "beta": "2.0", "gamma": "3.0"}
    assert distributions(["my_own_helper"]) == {}


def test_a_requirement_that_is_not_there_is_told(site: Site) -> None:
    site.install("alpha", "1.0", ["beta"])
    assert distributions(["alpha"]) == {"alpha": "1.0", "beta": "absent"}


def test_markers(site: Site) -> None:
    site.install("alpha", "1.0", ['beta; sys_platform == "win32"', 'gamma; python_version >= "3.8"'])
    site.install("beta", "1.0")
    site.install("gamma", "1.0")
    assert distributions(["alpha"]) == {"alpha": "1.0", "gamma": "1.0"}


def test_extras_only_where_they_are_asked_for(site: Site) -> None:
    extras = ['fast; extra == "speed-up"', 'slow; extra == "other"', "base"]
    site.install("server", "1.0", extras)
    for name in ("fast", "slow", "base"):
        site.install(name, "1.0")
    site.install("alpha", "1.0", ["server[speed_up]"])
    assert set(distributions(["server"])) == {"server", "base"}
    assert set(distributions(["alpha"])) == {"alpha", "server", "base", "fast"}


def test_names_of_modules_and_of_distributions_differ(site: Site) -> None:
    site.install("Some.Thing", "1.0", files=["thing.py", "_thing.cpython-311-x86_64-linux-gnu.so", "../../bin/thing"])
    site.install("scikit-x", "2.0", top_level="skx\n_skx\n", files=["elsewhere/__init__.py"])
    assert distributions(["thing"]) == {"some-thing": "1.0"}
    assert distributions(["_thing"]) == {"some-thing": "1.0"}
    assert distributions(["skx"]) == {"scikit-x": "2.0"}
    assert distributions(["bin"]) == distributions(["elsewhere"]) == {}


def test_a_namespace_belongs_to_all_that_are_in_it(site: Site) -> None:
    site.install("ns-a", "1.0", files=["ns/a/__init__.py"])
    site.install("ns-b", "2.0", files=["ns/b/__init__.py"])
    assert distributions(["ns"]) == {"ns-a": "1.0", "ns-b": "2.0"}


def test_an_upgrade_while_we_run_is_seen(site: Site) -> None:
    old = site.install("alpha", "1.0", ["beta"])
    site.install("beta", "1.0")
    assert distributions(["alpha"]) == {"alpha": "1.0", "beta": "1.0"}
    shutil.rmtree(old)
    site.install("alpha", "1.1", ["gamma"])
    assert distributions(["alpha"]) == {"alpha": "1.1", "gamma": "absent"}


def test_metadata_rewritten_in_place_are_seen(site: Site) -> None:
    info = site.install("alpha", "1.0")
    assert distributions(["alpha"]) == {"alpha": "1.0"}
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alpha\nVersion: 1.0.post1\n")
    assert distributions(["alpha"]) == {"alpha": "1.0.post1"}


def test_what_has_not_changed_is_not_read_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("alpha", "1.0", ["beta"])
    first = distributions(["alpha"])
    monkeypatch.setattr(environment, "_read_metadata", None)
    monkeypatch.setattr(environment, "_read_modules", None)
    assert distributions(["alpha"]) == first


def test_the_first_on_the_path_wins(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "front").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "front"), str(tmp_path), str(tmp_path / "missing"), "a.zip"])
    site.install("alpha", "1.0")
    Site(tmp_path / "front").install("alpha", "2.0")
    assert distributions(["alpha"]) == {"alpha": "2.0"}


def test_an_editable_installation(site: Site, tmp_path: Path) -> None:
    (tmp_path / "checkout" / "mine").mkdir(parents=True)
    (tmp_path / "checkout" / "single.py").touch()
    (tmp_path / "_mine.pth").write_text(f"{tmp_path / 'checkout'}\n")
    site.install("mine-dist", "0.1", files=["_mine.pth"])
    assert distributions(["mine"]) == distributions(["single"]) == {"mine-dist": "0.1"}


def test_old_metadata(site: Site, tmp_path: Path) -> None:
    info = tmp_path / "older-1.5.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: older\nVersion: 1.5\n")
    (info / "top_level.txt").write_text("older\n")
    (info / "requires.txt").write_text("alpha\n")
    site.install("broken", "1.0", ["alpha (", "older"])
    assert distributions(["broken"]) == {"broken": "1.0", "older": "1.5", "alpha": "absent"}


def test_agrees_with_the_standard_library_here() -> None:
    known = importlib.metadata.packages_distributions()
    for module in ("numpy", "pydantic", "sqlalchemy", "pytest", "yaml"):
        for name in known.get(module, []):
            found = distributions([module])
            assert found[environment.canonicalize_name(name)] == importlib.metadata.version(name)


def test_the_interpreter() -> None:
    assert python_version() == f"cpython {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"


X86 = """\
processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8480+
stepping	: 8
flags		: fpu vme sse4_2 avx2 avx512f amx_bf16 hypervisor
"""
ARM = """\
processor	: 0
Features	: fp asimd asimddp sve
CPU implementer	: 0x41
CPU part	: 0xd40
"""


def test_cpus() -> None:
    model, flags = parse_cpu(X86)
    assert model == "Intel(R) Xeon(R) Platinum 8480+ (6 143 8)"
    assert flags & environment.NUMERIC_FLAGS == {"sse4_2", "avx2", "avx512f", "amx_bf16"}
    model, flags = parse_cpu(ARM)
    assert model == "0x41 0xd40"
    assert flags & environment.NUMERIC_FLAGS == {"asimd", "asimddp", "sve"}
    assert parse_cpu("")[0]


def test_how_much_of_the_hardware_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_first_cpu", lambda: X86)
    monkeypatch.setattr(inventory, "gpus", lambda: ())
    assert hardware("none") == {}
    assert hardware("device") == {"device": "cpu"}
    model = "Intel(R) Xeon(R) Platinum 8480+ (6 143 8)"
    flags = ["amx_bf16", "avx2", "avx512f", "sse4_2"]
    assert hardware("exact") == {"device": "cpu", "cpu": model, "flags": flags, "gpus": []}
    monkeypatch.setattr(inventory, "gpus", lambda: (Gpu(0, "GPU-1", "NVIDIA H200", 1, "550.1"),))
    assert hardware("device") == {"device": "NVIDIA H200"}
    assert hardware("exact")["gpus"] == [{"model": "NVIDIA H200", "driver": "550.1"}]
