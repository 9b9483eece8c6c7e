"""`python -m onejob`: the same as the command `onejob`."""

from onejob.cli import main

if __name__ == "__main__":
    main()
