"""Who holds a port, as /proc tells it."""

from __future__ import annotations

from pathlib import Path

from onejob.serve.listener import holder

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"


def test_holder_is_the_process_whose_descriptor_listens(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    rows = [(8000, "0A", 11), (8001, "01", 12), (8002, "0A", 13)]
    text = HEAD + "".join(ROW.format(port=port, state=state, inode=inode) for port, state, inode in rows)
    (tmp_path / "net" / "tcp").write_text(text)
    for pid, inode in ((7, 12), (8, 11)):
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to(f"socket:[{inode}]")
    assert holder(8000, tmp_path) == 8
    assert holder(8001, tmp_path) is None  # connected, not listening
    assert holder(8002, tmp_path) is None  # nobody whom we may see


def test_holder_of_a_unix_socket(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    rows = [("00010000", 11, "/run/a b.sock"), ("00000000", 12, "/run/a b.sock"), ("00010000", 13, "/run/other")]
    lines = "".join(
        f"0000000000000000: 00000002 00000000 {flags} 0001 01 {inode} {path}\n" for flags, inode, path in rows
    )
    (tmp_path / "net" / "unix").write_text(f"Num RefCount Protocol Flags Type St Inode Path\n{lines}0: 2 0 0 1 1 14\n")
    for pid, inode in ((7, 12), (8, 11), (9, 13)):
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to(f"socket:[{inode}]")
    assert holder(Path("/run/a b.sock"), tmp_path) == 8
    assert holder(Path("/run/none"), tmp_path) is None
