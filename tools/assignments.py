"""Release, grade and check the assignments of the course kit, book/assignments/.

    python tools/assignments.py release [NAME ...] --to FOLDER    write the student versions
    python tools/assignments.py grade NAME FOLDER --to RESULTS    grade a folder of submissions
    python tools/assignments.py check [NAME ...]                  does each test catch what it should?
    python tools/assignments.py leaderboard FILE ...              rank recorded runs by NLL, at a budget
    python tools/assignments.py edit NAME                         write its text twin, _text/assignments/NAME.md
    python tools/assignments.py save NAME                         write the assignment from its twin
    python tools/assignments.py refresh                           write all with the Colab cell of this release

NAME is that of a notebook in book/assignments/, for example 01_gaussian_mechanism. FOLDER has a folder for each
student with the notebook in it, or the notebooks themselves, named after the students. RESULTS gets grades.csv and a
feedback page for each student. nbgrader, of requirements-teaching.txt, releases, executes and scores.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import course


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = described.add_subparsers(dest="command", required=True)
    for command in ("release", "check"):
        commands.add_parser(command).add_argument("names", nargs="*", metavar="NAME", help="all, where none is given")
    for command in ("edit", "save", "grade"):
        commands.add_parser(command).add_argument("name", metavar="NAME")
    commands.choices["release"].add_argument("--to", type=Path, required=True, metavar="FOLDER")
    grading = commands.choices["grade"]
    grading.add_argument("folder", type=Path, metavar="FOLDER")
    grading.add_argument("--to", type=Path, required=True, metavar="RESULTS")
    grading.add_argument("--cell", type=float, default=60, metavar="SECONDS", help="most processor time of one cell")
    grading.add_argument("--notebook", type=float, default=600, metavar="SECONDS", help="most time of one submission")
    grading.add_argument("--memory", type=float, default=4, metavar="GB", help="most memory of one submission")
    commands.add_parser("refresh")
    commands.add_parser("leaderboard").add_argument("files", nargs="+", type=Path, metavar="FILE")
    return described


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; 1 if `check` found something. Only `grade` loads all of nbgrader."""
    if arguments.command == "release":
        for name in arguments.names or course.names():
            print(course.release(name, arguments.to))
    elif arguments.command == "grade":
        from tools import grading

        limits = grading.Limits(arguments.cell, arguments.notebook, arguments.memory)
        grading.grade(arguments.name, arguments.folder, arguments.to, limits)
        print(arguments.to / "grades.csv")
    elif arguments.command == "check":
        from tools import kit

        found = [problem for name in arguments.names or course.names() for problem in kit.check(name)]
        print(*found, f"{len(found)} problems", sep="\n")
        return int(bool(found))
    elif arguments.command == "leaderboard":
        from tools import leaderboard

        print(*leaderboard.show(arguments.files), sep="\n")
    elif arguments.command == "refresh":
        for name in course.names():
            print(course.store(name, course.source(name)))
    else:
        print((course.edit if arguments.command == "edit" else course.save)(arguments.name))
    return 0


def main() -> int:
    arguments = parser().parse_args()
    try:
        return run(arguments)
    except ModuleNotFoundError as error:
        if error.name != "nbgrader":
            raise
        print("nbgrader is missing: pip install -r requirements-teaching.txt", file=sys.stderr)
    except (course.KitError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
