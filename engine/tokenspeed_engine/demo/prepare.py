"""Command line: trains the tokenizer on the standard library and writes the tokenised corpus for `train`."""

import argparse
import platform
from pathlib import Path

import numpy as np

from . import CHECKPOINT
from .config import DemoConfig
from .corpus import build, read_sources
from .tokenizer import save_tokenizer, train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder that receives the tokenizer")
    arguments = parser.parse_args()
    config, sources = DemoConfig(), read_sources()
    tokenizer = train_tokenizer((source.text for source in sources if not source.held_out), config.vocab_size)
    save_tokenizer(tokenizer, arguments.checkpoint, config.max_position_embeddings)
    streams = build(tokenizer, sources)
    arguments.corpus.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.corpus, **streams)  # type: ignore[arg-type]
    print(f"Python {platform.python_version()}: {len(sources)} files, {sum(len(s.text) for s in sources):,} characters")
    for name, ids in streams.items():
        print(f"{name}: {len(ids):,} tokens" if len(ids) > 1 else f"{name}: {ids[0]}")


if __name__ == "__main__":
    main()
