"""Write the text that the shipped model learns from: stories and dialogs, from `grammar/`.

    python stories/make.py --out stories_data     # train.txt and held_out.txt, a document a line

A variant of a rule may contain {slots}, values of this story or other rules, and <a|b> choices.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
Turn = tuple[str, str]


def read_rules(*names: str) -> dict[str, list[str]]:
    """The variants of each rule; those of `words.txt` are separated by commas or spaces."""
    rules: dict[str, list[str]] = {}
    for name in names:
        text = (HERE / "grammar" / f"{name}.txt").read_text()
        for key, body in re.findall(r"^\[(.+)\]\n([^\[]*)", text, flags=re.M):
            lines = body.strip().split("\n")
            rules[key] = re.split(r",\s+", " ".join(lines)) if name == "words" else lines
    for key in ("syllables", "codas"):
        rules[key] = rules[key][0].split()
    return rules


RULES = read_rules("words", "story", "chat")
OBJECT, OTHER = ((line.split(":")[0]).split() for line in RULES["plots"])
OPENINGS = {"": 6, "pair": 0.6, "sad": 0.6}
UNFIT = re.compile(
    "ass|tit|co[ck]k|di[ck]k?|nig|fag|sex|shit|pus|cum|slut|hell|kill|dumb|fat|pis|poo|bum"
)
MOODS = ("sad", "funny", "happy", "short", "nice", "bedtime", "little")


class World:
    """What is true in one story, and the sentences that tell it."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts
        self.facts: dict[str, str] = {}
        self.mood, self.told = "", ""

    def pick(self, rule: str) -> str:
        return self.rng.choice(RULES[rule])

    def word(self) -> tuple[str, str]:
        """A word to ask for and its class: often a rare one, sometimes one that does not exist."""
        kind = self.rng.choices(
            ("animal", "person", "thing", "rare", "made"), (30, 14, 20, 16, 20)
        )[0]
        if kind != "made":
            return self.pick(kind), kind
        while True:
            sounds = [self.pick("syllables") for _ in range(self.rng.choice((1, 1, 2, 2, 3)))]
            word = "".join(sounds) + self.pick("codas")
            if not UNFIT.search(word):
                return word, kind

    def being(self, prefix: str, kind: str | None = None, name: str | None = None) -> None:
        """Set the facts of the hero ("") or of the friend ("f")."""
        kind = kind or self.pick(self.rng.choice(("animal", "animal", "person")))
        she = kind in ("girl", "princess", "queen", "grandmother", "hen", "mermaid", "witch", "cow")
        he = kind in ("boy", "prince", "king", "grandfather", "rooster", "bull", "wizard")
        she = she or (not he and self.rng.random() < 0.5)
        words = ("she", "her", "her", "herself") if she else ("he", "him", "his", "himself")
        keys = ("he", "him", "his", "himself")
        self.facts |= {prefix + key: word for key, word in zip(keys, words, strict=True)}
        names = [n for n in RULES["she" if she else "he"] if n != self.facts.get("name")]
        self.facts[prefix + "name"] = name or self.rng.choice(names)
        self.facts["friend" if prefix else "kind"] = kind

    def begin(self, words: list[tuple[str, str]], place: str | None = None) -> None:
        """Choose the facts of a story about `words`, at most two."""
        rng, lives = self.rng, ("animal", "person")
        heroes = [w for w, k in words if k in lives]
        things = [w for w, k in words if k not in lives and (heroes or rng.random() < 0.6)]
        heroes += [w for w, _ in words if w not in heroes and w not in things]
        self.facts = {"place": place or self.pick("place")}
        self.being("", heroes[0] if heroes else None)
        self.being("f", heroes[1] if len(heroes) > 1 else None)
        while len(heroes) < 2 and self.facts["friend"] == self.facts["kind"]:
            self.being("f")
        self.person = self.facts["kind"] in RULES["person"]
        obj = things[0] if things else self.pick("thing")
        self.plot = rng.choice(OBJECT if things or rng.random() < 0.25 else OTHER)
        self.facts |= {"obj": obj, "ocolour": self.pick("colour")}
        self.facts["site"] = self.facts["place"].split(" ", 2)[2]
        for rule in ("colour", "adj", "nature", "garment", "food", "skill", "happy"):
            self.facts[rule] = self.pick(rule)
        for part in ("feel", "reason"):
            self.facts[part] = self.expand(self.pick(f"{self.plot}.{part}"))

    def expand(self, text: str) -> str:
        """Fill choices and slots."""
        text = re.sub(r"<([^<>]*)>", lambda m: self.rng.choice(m[1].split("|")), text)

        def fill(match: re.Match[str]) -> str:
            key = match[1]
            article = "a " if key.lower().startswith("a ") else ""
            key = key.removeprefix("a ").removeprefix("A ")
            lower = key[0].lower() + key[1:]
            value = article + (self.facts.get(lower) or self.pick(lower))
            return value[0].upper() + value[1:] if match[1][0].isupper() else value

        text = re.sub(r"\{([^{}]+)\}", fill, text)
        return re.sub(r"\b([Aa]) (?=[aeiou](?!nicorn|kulele|nicycle))", r"\1n ", text)

    def say(self, rule: str, chance: float = 1.0) -> list[str]:
        if self.rng.random() >= chance:
            return []
        variant = self.pick(rule)
        self.counts[f"{rule}: {variant}"] += 1
        return [self.expand(variant)]

    def story(self, brief: bool = False) -> str:
        """The whole story, in the mood that is set."""
        opening = self.rng.choices(list(OPENINGS), list(OPENINGS.values()))[0]
        parts = self.say("open" + (opening or "person" * self.person))
        if not brief:
            parts += self.say("desc", 0.7) + self.say("weather", 0.3)
        parts += self.say(f"{self.plot}.trouble")
        if opening != "sad":
            parts += self.say("feelsad")
        parts += [] if brief else self.say(f"{self.plot}.try", 0.7)
        if self.facts["fname"] not in " ".join(parts):
            parts += self.say("meet", 0.3 if brief else 1)
        parts += self.say("funny") if self.mood == "funny" else []
        if self.mood == "sad":
            parts += self.say("sadend")
        else:
            parts += self.say(f"{self.plot}.fix")
            parts += self.say("funnyend") if self.mood == "funny" else []
            parts += [] if brief else self.say("thanks", 0.5) + self.say("moral", 0.2)
            parts += self.say("end", 0 if self.mood == "funny" else 1)
        self.told = " ".join(parts)
        return self.told

    def questions(self, number: int) -> list[Turn]:
        """Questions that the story answers, and some that it does not."""
        facts, turns = self.facts, []
        told = [k for k in ("name", "friend", "place", "why", "feel") if self.is_told(k)]
        shades = {"kind": "colour", "obj": "ocolour", "garment": "colour"}
        for thing, shade in shades.items():
            if re.search(rf"\b{facts[shade]}\b(?: and \w+)? {facts[thing]}\b", self.told):
                told += [f"colour {thing}"] * 2
            elif thing == "kind" and re.search(rf"was (as )?{facts[shade]}", self.told):
                told += ["colour kind"] * 2
        told = self.rng.sample(told, min(number, len(told)))
        for question in told + ["unsaid"] * (self.rng.random() < 0.06):
            kind, _, thing = question.partition(" ")
            if thing:
                facts |= {"thing": facts[thing], "shade": facts[shades[thing]]}
            turns.append((self.say(f"q.{kind}")[0], self.say(f"a.{kind}")[0]))
        facts.pop("thing", None)
        return turns

    def is_told(self, question: str) -> bool:
        shown = {"why": "reason", "friend": "fname"}.get(question, question)
        return self.facts[shown].lower() in self.told.lower()

    def asked(self) -> tuple[str, str]:
        """A request for a story, and the story."""
        words = [self.word() for _ in range(self.rng.choice((1, 1, 1, 2)))]
        how = self.rng.choices(("ask", "askplace", "askname", "askmood", "askany"),
                               (70, 7, 6, 10, 7))[0]  # fmt: skip
        self.begin([] if how == "askany" else words)
        mood = self.rng.choice(MOODS)
        if how == "askmood":
            self.mood = mood if mood in ("sad", "funny") else ""
        named = " and ".join(f"a {w}" for w, _ in words)
        if how == "askname" and words[0][0] != self.facts["kind"]:
            how = "ask"
        if how == "askname":
            named = f"a {words[0][0]}"
            self.begin([(words[0][0], "animal")])
        self.facts |= {"x": named, "mood": mood}
        request = self.expand(self.pick(how))
        story = self.story(brief=self.brief or (how == "askmood" and mood == "short"))
        return request, story

    def small_talk(self) -> list[Turn]:
        kind = self.rng.choice(("hello", "hello", "who", "unknown", "unknown", "unknown", "sorry"))
        self.facts = {"x": f"a {self.pick(self.rng.choice(('animal', 'thing')))}"}
        self.facts |= {"digit": str(self.rng.randrange(2, 99))}
        return [(self.expand(self.pick(kind)), self.say(f"{kind}.a")[0])]

    def rhyme(self) -> Turn:
        word = self.word()
        self.begin([(word[0], "animal")])
        self.facts["x"] = f"a {word[0]}"
        request, lines = self.expand(self.pick("askrhyme")), self.rng.sample(RULES["rhyme"], 2)
        return request, "\n".join(self.expand(line).replace(" / ", "\n") for line in lines)

    def dialog(self) -> tuple[str, list[Turn]]:
        """A system message or none, and turns."""
        rng = self.rng
        self.mood, self.brief, turns = "", False, []
        system = rng.choice(("plain", "brief", "sad", "funny", "norhyme")) * (rng.random() < 0.22)
        self.mood = system if system in ("sad", "funny") else ""
        self.brief = system == "brief"
        if not system and rng.random() < 0.03:
            return (self.pick("sys.rhyme") if rng.random() < 0.3 else ""), [self.rhyme()]
        if rng.random() < 0.2:
            turns += self.small_talk()
        if not turns or rng.random() < 0.5:
            for _ in range(rng.choice((1, 1, 1, 1, 2))):
                turns += [self.asked(), *self.questions(rng.choice((0, 0, 1, 2, 3)))]
                if rng.random() < 0.08:
                    turns.append((self.pick("goon"), " ".join(
                        self.say("more") + self.say("more2") + self.say("more3"))))  # fmt: skip
                if rng.random() < 0.06 and self.mood != "sad":
                    turns.append((self.pick("shorter"), self.say("short")[0]))
        for kind, chance in (("thanks", 0.1), ("bye", 0.04)):
            if rng.random() < chance:
                self.facts["x"] = f"a {self.pick('animal')}"
                question = "thanks.q" if kind == "thanks" else kind
                turns.append((self.pick(question), self.say(f"{kind}.a")[0]))
        return (self.expand(self.pick(f"sys.{system}")) if system else ""), turns


def document(world: World) -> dict[str, object]:
    """A dialog, or in one of five cases a plain story."""
    if world.rng.random() < 0.8:
        system, turns = world.dialog()
        article = [(re.sub(r"\ba (?=[aeiou])", "an ", q), a) for q, a in turns]
        return {"system": system, "turns": article}
    world.mood, world.brief = world.rng.choice(("", "", "", "sad", "funny")), False
    world.begin([world.word() for _ in range(world.rng.choice((0, 1, 2)))])
    return {"text": world.story()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="stories_data", type=Path)
    parser.add_argument("--megabytes", default=24.0, type=float)
    parser.add_argument("--seed", default=17, type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, size, seed in (("held_out", 0.25, 1), ("train", args.megabytes, 0)):
        counts: Counter[str] = Counter()
        world = World(random.Random(args.seed + seed), counts)
        written = 0
        with open(args.out / f"{name}.jsonl", "w") as file:
            while written < size * 1e6:
                line = document(world)
                texts = line.get("turns") or [(line["text"],)]
                written += sum(len(part) for turn in texts for part in turn)  # type: ignore
                file.write(json.dumps(line) + "\n")
        total = sum(counts.values())
        print(f"{name}: {written:,} characters, {total:,} patterns told; the commonest:")
        for pattern, count in counts.most_common(5):
            print(f"  {100 * count / total:.2f} %  {pattern}")


if __name__ == "__main__":
    main()
