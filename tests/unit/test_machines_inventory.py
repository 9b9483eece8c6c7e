"""What a machine has, from recorded files: control groups of both versions, nvidia-smi's CSV."""

import os
from pathlib import Path

import pytest

from onejob.machines import inventory
from onejob.machines.inventory import Gpu, cpus, disk_free, memory, parse_gpus, threads_of

GIB = 1 << 30
PLENTY = "max 100000"

# the form in which nvidia-smi answers the query; written down by hand, not recorded on a machine with GPUs
H100S = """\
0, GPU-8a56a4bc-e184-a047-2620-be19fdf913d5, NVIDIA H100 80GB HBM3, 81559, 550.90.07
1, GPU-0fa3d9b1-2c2c-1f5e-6d1a-a2b5a1a3c7d4, NVIDIA H100 80GB HBM3, 81559, 550.90.07
"""


class Tree:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal:       {64 * 1024 * 1024} kB\nMemFree:  1 kB\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def group(self, text: str) -> None:
        self.write(self.proc / "self/cgroup", text)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return Tree(tmp_path)


def test_without_limits(tree: Tree) -> None:
    assert cpus(tree.proc, tree.cgroups) == 16.0
    assert memory(tree.proc, tree.cgroups) == 64 * GIB


def test_version_2_with_the_limit_further_up(tree: Tree) -> None:
    tree.group("0::/user.slice/app")
    tree.write(tree.cgroups / "user.slice/app/cpu.max", PLENTY)
    tree.write(tree.cgroups / "user.slice/cpu.max", "250000 100000")
    tree.write(tree.cgroups / "user.slice/app/memory.max", "max")
    tree.write(tree.cgroups / "user.slice/memory.max", str(8 * GIB))
    assert cpus(tree.proc, tree.cgroups) == 2.5
    assert memory(tree.proc, tree.cgroups) == 8 * GIB


def test_threads_are_the_cores_that_a_container_leaves_over_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "cpus", lambda: 6.5)
    assert [threads_of(processes) for processes in (1, 2, 3, 7)] == [6, 3, 2, 1]


def test_version_2_in_a_container_sees_its_own_group_as_the_root(tree: Tree) -> None:
    tree.group("0::/../../kubepods/pod1")
    tree.write(tree.cgroups / "cpu.max", "150000 100000")
    assert cpus(tree.proc, tree.cgroups) == 1.5


def test_version_1(tree: Tree) -> None:
    tree.group("5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc")
    tree.write(tree.cgroups / "cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "300000")
    tree.write(tree.cgroups / "cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000")
    tree.write(tree.cgroups / "cpu,cpuacct/cpu.cfs_quota_us", "-1")
    tree.write(tree.cgroups / "cpu,cpuacct/cpu.cfs_period_us", "100000")
    tree.write(tree.cgroups / "memory/docker/abc/memory.limit_in_bytes", str(4 * GIB))
    tree.write(tree.cgroups / "memory/memory.limit_in_bytes", "9223372036854771712")
    assert cpus(tree.proc, tree.cgroups) == 3.0
    assert memory(tree.proc, tree.cgroups) == 4 * GIB


def test_a_quota_above_the_affinity_adds_nothing(tree: Tree) -> None:
    tree.group("0::/")
    tree.write(tree.cgroups / "cpu.max", "6400000 100000")
    assert cpus(tree.proc, tree.cgroups) == 16.0


def test_gpus() -> None:
    assert parse_gpus(H100S) == (
        Gpu(0, "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5", "NVIDIA H100 80GB HBM3", 81559 << 20, "550.90.07"),
        Gpu(1, "GPU-0fa3d9b1-2c2c-1f5e-6d1a-a2b5a1a3c7d4", "NVIDIA H100 80GB HBM3", 81559 << 20, "550.90.07"),
    )


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Unable to determine the device handle\n, , , ,\n"])
def test_complaints_are_no_gpus(text: str) -> None:
    assert parse_gpus(text) == ()


def test_a_gpu_that_shares_the_hosts_memory() -> None:
    (gpu,) = parse_gpus("0, GPU-1, NVIDIA GB10, [N/A], 580.95.05\n")
    assert (gpu.model, gpu.memory) == ("NVIDIA GB10", 0)


def test_no_driver_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory.shutil, "which", lambda name: None)
    assert inventory.gpus() == ()


def test_room_on_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "a" / "b") > 0


def test_this_machine() -> None:
    machine = inventory.machine()
    assert 0 < machine.cpus <= os.cpu_count()
    assert machine.memory > 1 << 20
