"""Generates stories of a few characters, with a state that all sentences agree with.

The state is who holds which thing, and where the hero is. An episode reads the state, tells what
happens and changes the state. So, for example, no character gives away a thing that they do not
have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.words import (
    COLOURS,
    FOODS,
    KINDS,
    MOODS,
    NAMES,
    NUMBERS,
    PLACES,
    THINGS,
    WEATHERS,
    Kind,
    Name,
    Place,
    with_article,
)

MIN_CAST = 2
MAX_CAST = 4
EMOJI_SHARE = 0.12

_OPENINGS = ("Once upon a time", "Long ago", "One day", "Once")
_NEXT = ("The next day", "The next morning", "A week later", "That evening", "Some days later")
_WENT = ("walked", "ran", "went", "hurried")
_ENDINGS = (
    "They were happy, and they stayed friends.",
    "From that day on they shared everything.",
    "They sat together until the stars came out.",
    "And they never forgot that day.",
)


@dataclass(frozen=True)
class Character:
    """One member of the cast."""

    name: Name
    kind: Kind

    def __str__(self) -> str:
        return self.name.word


class Story:
    """The state of a story; `tell` draws its episodes and returns the text."""

    def __init__(self, rng: Random, kind: Kind | None = None) -> None:
        self.rng = rng
        names = rng.sample(NAMES, rng.randint(MIN_CAST, MAX_CAST))
        kinds = rng.sample(KINDS, len(names))
        if kind is not None:
            kinds = [kind, *(other for other in kinds if other != kind)][: len(names)]
        self.cast = [Character(name, k) for name, k in zip(names, kinds, strict=True)]
        self.hero = self.cast[0]
        self.met: set[Character] = {self.hero}
        self.place = rng.choice(PLACES)
        self.things = [
            f"{colour} {thing}"
            for colour, thing in zip(rng.sample(COLOURS, 6), rng.sample(THINGS, 6), strict=True)
        ]
        self.holder: dict[str, Character] = {}
        self.last: Callable[[], list[str]] | None = None

    def tell(self, episodes: int) -> str:
        """Return the whole story, as one line of text per paragraph."""
        paragraphs = [self.opening()]
        for number in range(episodes):
            lines = self.pick()()
            if number:
                lines[0] = f"{self.rng.choice(_NEXT)} {lines[0]}"
            else:
                lines[0] = f"One morning {lines[0]}"
            paragraphs.append(" ".join(lines))
        paragraphs.append(self.ending())
        return "\n".join(paragraphs)

    def pick(self) -> Callable[[], list[str]]:
        """Draw an episode that the state allows, but not the same as the last one."""
        mine = self.mine()
        theirs = [thing for thing in self.holder if thing not in mine]
        choices: list[Callable[[], list[str]]] = [self.rain, self.meal, self.song]
        if len(self.holder) < len(self.things):
            choices += [self.find, self.find]
        if mine:
            choices += [self.lose, self.gift]
        if mine and theirs:
            choices += [self.swap, self.swap]
        if theirs:
            choices += [self.give_back]
        allowed = [episode for episode in choices if episode != self.last]
        self.last = self.rng.choice(allowed)
        return self.last

    # ---- state ----

    def held_by(self, who: Character) -> list[str]:
        return [thing for thing, holder in self.holder.items() if holder == who]

    def mine(self) -> list[str]:
        return self.held_by(self.hero)

    def move(self) -> Place:
        """Move the hero to another place, and return that place."""
        self.place = self.rng.choice([p for p in PLACES if p != self.place])
        return self.place

    def friend(self) -> Character:
        return self.rng.choice(self.cast[1:])

    # ---- sentences ----

    def walk(self) -> str:
        return f"{self.hero} {self.rng.choice(_WENT)} to the {self.move().word}."

    def meet(self, other: Character) -> str:
        """Return words for meeting `other`: an introduction the first time, afterwards the name."""
        here = f"{self.place.at} the {self.place.word}"
        if other in self.met:
            return self.rng.choice(
                [f"{other} was there too.", f"There {self.hero.name.he} saw {other} again."]
            )
        self.met.add(other)
        animal = with_article(f"{self.rng.choice(MOODS)} {other.kind.word}")
        return self.rng.choice(
            [
                f"There {self.hero.name.he} met {other}, {animal}.",
                f"{here.capitalize()} sat {animal} named {other}.",
            ]
        )

    def opening(self) -> str:
        rng, hero = self.rng, self.hero
        animal = with_article(f"{rng.choice(MOODS)} {hero.kind.word}")
        where = f"{self.place.at} the {self.place.word}"
        first = rng.choice(
            [
                f"{rng.choice(_OPENINGS)} there was {animal} named {hero}, who lived {where}.",
                f"{rng.choice(_OPENINGS)} {animal} lived {where}. {hero.name.his.capitalize()} "
                f"name was {hero}.",
            ]
        )
        if rng.random() < 0.6:
            thing = self.new_thing(hero)
            first += f" {hero} had {with_article(thing)} and loved it very much."
        return first

    def new_thing(self, owner: Character) -> str:
        thing = self.things[len(self.holder)]
        self.holder[thing] = owner
        return thing

    def recap(self) -> str:
        """Return one true sentence about who holds what."""
        thing = self.rng.choice(list(self.holder))
        return self.rng.choice(
            [
                f"Now {self.holder[thing]} had the {thing}.",
                f"So the {thing} was with {self.holder[thing]}.",
            ]
        )

    def ending(self) -> str:
        lines = []
        if self.holder and self.rng.random() < 0.7:
            lines.append(
                " ".join(
                    f"In the end {holder} had the {thing}."
                    for thing, holder in list(self.holder.items())[:2]
                )
            )
        lines.append(self.rng.choice(_ENDINGS))
        end = "The end."
        if self.rng.random() < EMOJI_SHARE:
            end += f" {self.hero.kind.emoji}"
        return " ".join([*lines, end])

    # ---- episodes: each returns its sentences; the first one can follow "One morning" ----

    def find(self) -> list[str]:
        lines = [self.walk()]
        thing = self.new_thing(self.hero)
        where = self.rng.choice(["in the grass", "under a stone", "behind a tree", "in a box"])
        lines.append(f"There, {where}, {self.hero.name.he} found {with_article(thing)}.")
        lines.append(
            self.rng.choice(
                [
                    f'"What a lovely {thing}!" said {self.hero}.',
                    f"{self.hero} took the {thing} home.",
                    f"It was {with_article(thing)} – and it was beautiful.",
                ]
            )
        )
        return lines

    def lose(self) -> list[str]:
        hero, thing = self.hero, self.rng.choice(self.mine())
        lost = self.place
        lines = [f"{hero} could not find the {thing}."]
        other = self.friend()
        lines += [self.walk(), self.meet(other)]
        lines.append(f'"Have you seen my {thing}?" asked {hero}.')
        lines.append(f'"No," said {other}, "but I will help you look."')
        wrong = self.move()
        lines.append(f"They looked {wrong.at} the {wrong.word}, but it was not there.")
        self.place = lost
        lines.append(f"Then they looked {lost.at} the {lost.word}, and there was the {thing}!")
        lines.append(f'"Thank you, {other}," said {hero}. {hero} was glad to have the {thing}.')
        return lines

    def gift(self) -> list[str]:
        hero, thing, other = self.hero, self.rng.choice(self.mine()), self.friend()
        lines = [self.walk(), self.meet(other)]
        lines.append(
            self.rng.choice(
                [
                    f"{other} was sad, for {other.name.he} had nothing to play with.",
                    f'"I like your {thing}," said {other}.',
                    f"It was {other}'s birthday.",
                ]
            )
        )
        self.holder[thing] = other
        lines.append(f'{hero} gave the {thing} to {other}. "Thank you!" said {other}.')
        lines.append(f"Now {other} had the {thing}.")
        return lines

    def give_back(self) -> list[str]:
        thing = self.rng.choice([t for t in self.holder if t not in self.mine()])
        other = self.holder[thing]
        lines = [self.walk(), self.meet(other)]
        self.holder[thing] = self.hero
        lines.append(f'{other} still had the {thing}. "You may have it now," said {other}.')
        lines.append(f"So {other} gave the {thing} to {self.hero}.")
        return lines

    def swap(self) -> list[str]:
        hero, mine = self.hero, self.rng.choice(self.mine())
        theirs = self.rng.choice([t for t in self.holder if t not in self.mine()])
        other = self.holder[theirs]
        lines = [self.walk(), self.meet(other)]
        lines.append(f'"I will give you my {mine} for your {theirs}," said {hero}.')
        lines.append(f'"Yes, let us swap," said {other}.')
        self.holder[mine], self.holder[theirs] = other, hero
        lines.append(f"Now {hero} had the {theirs} and {other} had the {mine}.")
        return lines

    def rain(self) -> list[str]:
        other = self.friend()
        lines = [self.walk(), f"It was {with_article(self.rng.choice(WEATHERS))} day."]
        lines.append(f"Then it began to rain. {self.meet(other)}")
        shelter = self.move()
        lines.append(
            f'"Come with me," said {other}, and they ran to the {shelter.word}. '
            f"There they waited until the rain stopped."
        )
        return lines + ([self.recap()] if self.holder else [])

    def meal(self) -> list[str]:
        other, food = self.friend(), self.rng.choice(FOODS)
        count = self.rng.randrange(len(NUMBERS) - 1)
        lines = [self.walk(), self.meet(other)]
        lines.append(f"{other} had {NUMBERS[count]} {food}, and {self.hero} had one.")
        lines.append(f"Together they had {NUMBERS[count + 1]} {food}, and they ate them all.")
        return lines

    def song(self) -> list[str]:
        other = self.friend()
        lines = [self.walk(), self.meet(other)]
        about = self.rng.choice(list(self.holder)) if self.holder else "big sea"
        lines.append(f"They sang a song about the {about} and danced.")
        lines.append(f'"That was fun," said {self.rng.choice([self.hero, other])}.')
        return lines


def tell(rng: Random, episodes: int, kind: Kind | None = None) -> str:
    """Return a story of `episodes` episodes, about an animal of `kind` if given.

    An episode has 50 to 70 tokens.
    """
    return Story(rng, kind).tell(episodes)
