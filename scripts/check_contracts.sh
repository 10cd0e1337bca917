#!/usr/bin/env bash
# Fails when the contracts break callers of those of the commit in proto/BASELINE, on the wire, in JSON or, but for
# proto/EXCEPTIONS, in generated code. A release moves the baseline and empties the exceptions.
set -euo pipefail
cd "$(dirname "$0")/.."
baseline=$(cat proto/BASELINE)
git cat-file -e "$baseline^{commit}" 2>/dev/null || {
  echo "this clone lacks commit $baseline, which proto/BASELINE names: run 'git fetch origin $baseline'" >&2
  exit 2
}
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$baseline" proto buf.yaml | tar -x -C "$before"
buf=.tools/buf/node_modules/.bin/buf
"$buf" breaking --against "$before" --config '{"version": "v2", "modules": [{"path": "proto"}], "breaking": {"use": ["WIRE_JSON"]}}'
"$buf" breaking --against "$before" --error-format json >"$before/found" || [ $? = 100 ]
python3 - "$before/found" proto/EXCEPTIONS <<'END'
import json, pathlib, sys

found = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
rows = [line.split(" | ") for line in pathlib.Path(sys.argv[2]).read_text().splitlines() if line and line[0] != "#"]
hits = {row[0] + row[1]: 0 for row in rows}
faults = []
for change in found:
    row = next((row for row in rows if row[0] == change["type"] and row[1] in change["message"]), None)
    if row is None:
        faults.append(f"{change['path']}:{change.get('start_line', 1)}: {change['type']}: {change['message']}")
    else:
        hits[row[0] + row[1]] += 1
faults += [f"{sys.argv[2]}: {row[0]} | {row[1]} is no change any more: remove the line" for row in rows if not hits[row[0] + row[1]]]
sys.exit("\n".join(faults) or None)
END
