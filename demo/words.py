"""The nouns of the demo model's small world: all that a story or a question can name."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of animal that can be a character; some of its stories end with `emoji`."""

    word: str
    emoji: str


class Name(NamedTuple):
    """A character's name with its pronouns."""

    word: str
    he: str
    his: str
    him: str


class Place(NamedTuple):
    """A place, as in "walked to the mill" and "was at the mill"."""

    word: str
    at: str


KINDS = tuple(
    Kind(*pair.split(":"))
    for pair in (
        "fox:🦊 cat:🐱 dog:🐶 bear:🐻 frog:🐸 owl:🦉 rabbit:🐰 mouse:🐭 hedgehog:🦔 duck:🦆 "
        "goat:🐐 otter:🦦"
    ).split()
)

_SHE = "Mira Zoé Ada Lena Renée Chloë Nora Ida Märta Pia Tilda Ruth"
_HE = "Otto Jürg Ben René Björn Tom Noël Emil Jörg Paul Hugo Sam"
NAMES = tuple(Name(word, "she", "her", "her") for word in _SHE.split()) + tuple(
    Name(word, "he", "his", "him") for word in _HE.split()
)

PLACES = tuple(
    Place(word, at)
    for at, words in (
        ("at", "old mill/market/café/well/harbour/station/gate/lighthouse/bakery/school"),
        ("by", "river/lake/sea/pond/big oak/stone bridge"),
        ("in", "forest/meadow/garden/library/cave/barn/valley"),
        ("on", "hill/island/beach"),
    )
    for word in words.split("/")
)

COLOURS = tuple("red blue green yellow white black golden silver".split())
THINGS = tuple(
    "lamp kite key bell drum ball boat book coat hat map cup basket ring flute rope "
    "spoon mirror clock shell".split()
)
FOODS = tuple("pears apples plums nuts berries cakes pancakes carrots éclairs cookies".split())
MOODS = tuple("small brave shy kind clever old young merry quiet curious".split())
WEATHERS = tuple("sunny windy cold warm foggy bright cloudy frosty".split())
NUMBERS = tuple("two three four five six seven eight nine".split())

SPELLABLE = tuple(
    dict.fromkeys(
        [kind.word for kind in KINDS]
        + list(THINGS)
        + [word for word in COLOURS if len(word) < 6]
        + "star tree moon sun bird fish rain snow wind leaf stone house road wolf hand milk".split()
    )
)


def with_article(noun: str) -> str:
    """Return `noun` with its indefinite article: "an owl", "a red key"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
