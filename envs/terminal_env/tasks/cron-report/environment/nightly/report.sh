#!/bin/bash
# report.sh DAY: add up the amounts of one day.
. lib.sh
cd $REPORT_HOME

day=$1
> out/report-$day.txt
for category in $(cut -d, -f1 data/$day.csv | sort -u); do
  total $category < data/$day.csv >> out/report-$day.txt
done
echo "report of $day written"
