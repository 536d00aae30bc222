"""Grade a class: write marks.csv for a folder of solutions, and list the topics to explain next.

python examples/grade_class.py examples/solutions marks.csv
"""

import csv
import os
import subprocess
import sys
from collections import defaultdict

if len(sys.argv) != 3:
    sys.exit("usage: grade_class.py FOLDER MARKS.csv")
folder, marks = sys.argv[1:]
if os.path.lexists(marks):  # else a failed check would leave the old marks
    sys.exit(f"{marks} is there already: move it, or name another file")

# Every solution runs in a separate process, with limits of time and memory.
check = [sys.executable, "-m", "pyringar", "check", folder, "--csv", marks]
status = subprocess.run(check).returncode
if not os.path.exists(marks):  # marks are in marks.csv.part until complete
    sys.exit(f"no marks were written: pyringar check ended with status {status}")

by_property = defaultdict(list)
with open(marks, newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        if row["first_look_at"]:
            by_property[row["first_look_at"]].append(row["file"])

print("\nFor the next lesson:")
for name, files in sorted(by_property.items(), key=lambda item: len(item[1]), reverse=True):
    print(f"  {name}: {', '.join(sorted(files))}")
