"""How much of everything a client may ask for, and why so much; docs/gateway.md has the limits as a table.

`GatewayLimits` is what whoever serves a gateway may change. The constants hold for all.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of one gateway; docs/gateway.md says what answers a request above each.

    `max_json_values` counts the commas and opening brackets of a body, those within texts too: that is quick, and no
    body has more values than that and one.
    """

    max_body_bytes: int = 16 * 2**20
    max_waiting_bytes: int = 2**28  # of all bodies whose calls have not begun: sixteen of the largest
    max_json_values: int = 2**18  # JSON is parsed in one go, and all sessions wait for it
    max_text_len: int = 2**20  # characters: 250,000 tokens of English, but four times as many of rare characters
    max_calls: int = 1024  # to the engine in flight, abandoned ones too
    max_session_calls: int = 2**14  # ever made; a session keeps each of them in memory
    max_images: int = 64
    max_pixels: int = 2**24  # of one image
    max_total_pixels: int = 2**26  # of all images of a request: 200 MB
    max_connections: int = 2**14  # with heads of 16 KiB, 256 MiB that need no key
    idle_s: int = 15  # until the head of a request is whole; clients end idle connections after 5 s
    body_s: int = 60  # until its body is whole; a client must take something of its answer within it, too

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1; leave it out for the default")

    @property
    def max_session_waiting_bytes(self) -> int:
        """Bytes that wait of one session: an eighth of `max_waiting_bytes`, but any one body may."""
        return max(self.max_body_bytes, self.max_waiting_bytes // 8)


MAX_HEAD_BYTES = 2**14
"""Of a request's line and headers; h11's own bound. Those of OpenAI's clients have 1 KiB."""

NUM_THREADS = 4
"""Threads that read and render requests. A session uses one at a time, so that one cannot hold up the others."""

MAX_FIELDS = 64
"""Fields of a JSON object whose names are known; no API has half as many."""

MAX_MESSAGES = 4096
"""Messages or items of a request. OpenAI takes 2,048."""

MAX_PARTS = 1024
"""Parts of a message, and calls in it."""

MAX_TOOLS = 128
"""Functions of a request; OpenAI's limit."""

MAX_STOPS = 4
"""Stop strings; OpenAI's limit."""

MAX_STOP_LEN = 256
"""Characters of a stop string: so much text of a stream is held back."""

MAX_SEED = 2**62
"""Seeds are 64-bit integers for the engine, with room for those of further choices."""

MAX_TOKENS = 2**31 - 1
"""Tokens of an answer that can be asked for: a 32-bit integer for the engine."""

MAX_METADATA = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
"""Pairs of metadata, all strings; OpenAI's limits."""

SURE_TEXT_LEN = 2**16
"""Characters that are always tokenised, so that the answer names the tokens of the prompt."""

MAX_NESTING = 64
"""Levels of a JSON schema, and of the arguments of a call that are parsed. Python's own JSON ends at about 1,000."""

# Forms of an answer, with all their functions. At these limits XGrammar 0.2 reads a form in seconds, here, and compiles
# it in seconds to half a minute, in vLLM. With properties and repeats the time grows with the square or faster: at ten
# times as many it is minutes.
MAX_SCHEMA_LEN = 2**17
"""Characters of the JSON of all schemas."""

MAX_PROPERTIES = 500
"""Properties of one object. Optional ones may be left out in any combination."""

MAX_ENUM = 1000
"""Values of all enumerations; OpenAI's limit."""

MAX_REPEATED_LEN = 1024
"""Characters that counted repeats add to patterns, e.g. 63 for `[0-9a-f]{64}`. The time grows with their square: half a
second for so many, a minute for ten times as many."""

MAX_REPEATS = 64
"""How often patterns may repeat something beyond what they must, e.g. 3 for `a{2,5}`; nested ones multiply."""

MAX_ERRORS = 10
"""Errors that an answer names."""

MAX_SHOWN_LEN = 60
"""Characters of a value or a name in an error."""

MAX_ERROR_LEN = 4096
"""Characters of the message of an error."""
