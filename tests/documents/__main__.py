"""`python -m tests.documents`: every command of the documents, and what the tests do with it."""

from __future__ import annotations

import sys

from tests.documents.reading import DOCUMENTS, How, read


def main() -> int:
    documents = [read(path) for path in DOCUMENTS]
    for how in How:
        print(f"\n{how.value}")
        for command in (each for document in documents for each in document.commands if each.how is how):
            mark = f"  ({command.mark})" if command.mark else ""
            print(f"  {command.place:32} {command.text}{mark}")
    complaints = [complaint for document in documents for complaint in document.complaints]
    print("", *complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
