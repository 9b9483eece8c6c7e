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
