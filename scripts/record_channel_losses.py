"""Write tests/golden/verl/: batches of scripted episodes, and TRL's losses of the channels for them.

It needs the environment of `make trainer`. VeRL's tests compute the losses of the same batches, in an environment where
TRL cannot be.

python scripts/record_channel_losses.py          # write
python scripts/record_channel_losses.py --check  # exit 1 where a file has something else, and print what
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]
os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")

from loss_recorder import CASES, record  # noqa: E402 # found through the path set above
from recorded_losses import DIRECTORY, differences, load, text_of  # noqa: E402

from errata_server.process import ServerProcess  # noqa: E402


def main() -> int:
    """Write or check the files."""
    checks = "--check" in sys.argv[1:]
    wrong = False
    with (
        tempfile.TemporaryDirectory() as scratch,
        ServerProcess("tests.environments.shelf:SPEC", Path(scratch) / "data") as server,
    ):
        for name, case in CASES.items():
            recorded = record(case, server.url, Path(scratch))
            if not checks:
                (DIRECTORY / f"{name}.json").write_text(text_of(recorded), encoding="ascii")
                continue
            for found in differences(recorded, load(name)):
                wrong = True
                print(f"{name}: {found}", file=sys.stderr)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
