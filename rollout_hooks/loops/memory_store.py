"""Notes of one session in an SQLite full-text index (FTS5) in memory, with an optional embedding index.

A query is a bag of words: each word becomes a quoted FTS5 string, and OR joins them, so no query of a model is a syntax
error. Notes rank by BM25. With embeddings they also rank by cosine, and reciprocal rank fusion merges the rankings: a
note scores the sum of 1 / (60 + its rank) (Cormack, Clarke and Buettcher, SIGIR 2009).
"""

import asyncio
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Embed = Callable[[Sequence[str]], np.ndarray]
"""Maps N texts to vectors of shape (N, dimensions)."""

MAX_QUERY_WORDS = 64
FUSION_CONSTANT = 60


@dataclass(frozen=True, slots=True)
class Note:
    """A text that was kept; `number` is its place in the order of writing, from 1."""

    number: int
    text: str


class MemoryStore:
    """The notes of one session.

    Reads and writes run in the order in which they were asked for, so concurrent tool calls number their notes in the
    order of the calls. `embed` is called in a thread for each note and query; without it only words count.
    """

    def __init__(self, *, embed: Embed | None = None) -> None:
        self._embed = embed
        self._notes: list[Note] = []
        self._vectors: list[np.ndarray] = []
        self._index = sqlite3.connect(":memory:")
        self._index.execute("CREATE VIRTUAL TABLE notes USING fts5(text, content='')")
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._notes)

    async def write(self, text: str) -> Note:
        """Add a note."""
        text = _encodable(text)
        async with self._lock:
            if self._embed is not None:
                self._vectors.append(await self._vector(self._embed, text))
            note = Note(len(self._notes) + 1, text)
            self._index.execute("INSERT INTO notes(rowid, text) VALUES (?, ?)", (note.number, text))
            self._notes.append(note)
        return note

    async def search(self, query: str, *, limit: int) -> list[Note]:
        """Return the notes that fit a query (any text), best first, and older first among equals.

        A note without a word of the query is found through embeddings only.

        Raises:
            ValueError: If `limit` < 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit}: ask for at least 1 note")
        query = _encodable(query)
        async with self._lock:
            rankings = [self._by_words(query)]
            if self._embed is not None and self._vectors:
                cosines = np.stack(self._vectors) @ await self._vector(self._embed, query)
                rankings.append((np.argsort(-cosines, kind="stable") + 1).tolist())
        scores: dict[int, float] = defaultdict(float)
        for ranking in rankings:
            for rank, number in enumerate(ranking, start=1):
                scores[number] += 1.0 / (FUSION_CONSTANT + rank)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:limit]
        return [self._notes[number - 1] for number in best]

    async def newest(self, *, limit: int) -> list[Note]:
        """Return the last notes, newest first."""
        async with self._lock:
            return self._notes[::-1][:limit]

    def close(self) -> None:
        """Free the index."""
        self._index.close()

    def _by_words(self, query: str) -> list[int]:
        words = list(dict.fromkeys(re.findall(r"\w+", query.lower())))[:MAX_QUERY_WORDS]
        if not words:
            return []
        expression = " OR ".join(f'"{word}"' for word in words)
        ranked = "SELECT rowid FROM notes WHERE notes MATCH ? ORDER BY rank, rowid"
        return [number for (number,) in self._index.execute(ranked, (expression,))]

    @staticmethod
    async def _vector(embed: Embed, text: str) -> np.ndarray:
        """Return the embedding of a text, scaled to length 1 unless it is zero."""
        vectors = np.asarray(await asyncio.to_thread(embed, [text]), dtype=np.float64)
        if vectors.ndim != 2 or len(vectors) != 1:
            raise ValueError(f"embed gave an array of shape {vectors.shape} for 1 text: it must be (1, dimensions)")
        return vectors[0] / max(float(np.linalg.norm(vectors[0])), 1e-12)


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which a model's JSON can hold and SQLite refuses."""
    return text.encode("utf-8", "replace").decode("utf-8")
