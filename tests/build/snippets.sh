#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# A line `<!-- snippet FILE NAME -->` in a page says that the code block after it stands in FILE between
# `// example-begin NAME` and `// example-end`, so that a test compiles what the page shows. This compares the two,
# leaving indentation aside.
set -euo pipefail
cd "$(dirname "$0")/../.."

# code FILE NAME: the marked lines of a test.
code() {
  awk -v name="$2" '$1 == "//" && $2 == "example-end" { on = 0 }
                    on { print }
                    $1 == "//" && $2 == "example-begin" && $3 == name { on = 1 }' "$1"
}
# block PAGE LINE: the code block after a line of a page.
block() { awk -v from="$2" 'NR <= from { next } /^```/ { if (on) exit; on = 1; next } on { print }' "$1"; }
plain() { sed -E 's/^[[:space:]]+//; s/[[:space:]]+$//' | grep -v '^$' || true; }

bad=0 seen=0
while IFS=: read -r page line text; do
  read -r _ _ file name _ <<<"$text"
  seen=$((seen + 1))
  expected=$(code "$file" "$name" | plain)
  if [ -z "$expected" ]; then
    echo "$page:$line: $file has no example named $name"
    bad=$((bad + 1))
  elif ! diff <(echo "$expected") <(block "$page" "$line" | plain) >/tmp/snippet.$$; then
    echo "$page:$line: differs from $file, example $name:"
    cat /tmp/snippet.$$
    bad=$((bad + 1))
  fi
done < <(grep -nH '^<!-- snippet ' README.md docs/*.md)
rm -f /tmp/snippet.$$
echo "$seen snippets, $bad wrong"
[ "$bad" = 0 ] && [ "$seen" -gt 0 ]
