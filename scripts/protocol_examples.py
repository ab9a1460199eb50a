"""Write the server's lines of the example exchanges in rfcs/PROTOCOL.md, as a server in this process says them.

python scripts/protocol_examples.py           # write
python scripts/protocol_examples.py --check   # exit 1 where a line is not what would be written
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.protocol_exchanges import BLOCK, TEXT, exchanges, recorded


def main() -> int:
    """Write or compare the exchanges; return the exit status."""
    text = TEXT.read_text()
    written = [asyncio.run(recorded(exchange)) for exchange in exchanges(text)]
    blocks = iter(written)
    now = BLOCK.sub(lambda m: m[0].replace(m[3], "\n".join(next(blocks)) + "\n"), text)
    if "--check" in sys.argv:
        if now != text:
            print(f"{TEXT.name}: an exchange is not what the server says: python scripts/protocol_examples.py")
        return int(now != text)
    TEXT.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
