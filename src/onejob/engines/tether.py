"""Runs a program that ends when its parent ends, whatever that dies of: `python tether.py PARENT PROGRAM ARGUMENT…`

It becomes the program, so the pid is the program's. It is run as a file, without site packages: it starts quickly.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(argv[0]):
        os._exit(0)  # it died before we could ask
    os.execv(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
