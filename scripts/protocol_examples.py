"""Write the server's lines of the example exchanges in rfcs/PROTOCOL.md and rfcs/notes/, as a server here says them.

python scripts/protocol_examples.py           # write
python scripts/protocol_examples.py --check   # exit 1 where a line is not what would be written
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.protocol_exchanges import BLOCK, NOTES, TEXT, exchanges, recorded


def main() -> int:
    """Write or compare the exchanges of each text; return the exit status."""
    stale = 0
    for path in (TEXT, *NOTES):
        text = path.read_text()
        blocks = iter([asyncio.run(recorded(exchange)) for exchange in exchanges(text)])
        now = BLOCK.sub(lambda m: m[0].replace(m[3], "\n".join(next(blocks)) + "\n"), text)  # noqa: B023
        if now != text and "--check" in sys.argv:
            print(f"{path.name}: an exchange is not what the server says: python scripts/protocol_examples.py")
            stale = 1
        elif now != text:
            path.write_text(now)
    return stale


if __name__ == "__main__":
    sys.exit(main())
