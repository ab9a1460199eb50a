cd /workspace/nightly
cat > report.sh <<'SCRIPT'
#!/bin/bash
# report.sh DAY: add up the amounts of one day.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
day=$1
if [ ! -f "data/$day.csv" ]; then
  echo "report.sh: no data of $day" >&2
  exit 1
fi
mkdir -p out
new=$(mktemp out/.report.XXXXXX)
trap 'rm -f "$new"' EXIT
if ! LC_ALL=C awk -F, '
  {sub(/\r$/, "")}
  /^$/ {next}
  NF != 2 || $1 == "" || $2 !~ /^-?[0-9]+$/ {print "report.sh: line " NR " of the data is wrong" > "/dev/stderr"; wrong = 1; exit 1}
  {sum[$1] += $2}
  END {if (!wrong) for (category in sum) print category, sum[category]}' "data/$day.csv" | LC_ALL=C sort > "$new"; then
  exit 1
fi
chmod 644 "$new"
mv "$new" "out/report-$day.txt"
SCRIPT
echo '30 2 * * 1-5 bash /workspace/nightly/report.sh "$(date +\%Y-\%m-\%d)"' > crontab
cd /
env -i HOME=/ PATH=/usr/bin:/bin bash /workspace/nightly/report.sh 2025-12-01
cat /workspace/nightly/out/report-2025-12-01.txt
