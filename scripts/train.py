"""One rank of a run, for torchrun on one machine or many:

    torchrun --nproc-per-node 8 scripts/train.py RECIPE [key=value ...] [--out DIR] [--resume]
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \
        scripts/train.py RECIPE ...
"""

from __future__ import annotations

import sys

from fastturn.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
