"""Run the validation: ``python -m validation --quick``."""

import sys

from validation.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
