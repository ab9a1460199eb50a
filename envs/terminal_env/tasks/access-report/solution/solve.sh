cd /workspace
awk -F'"' '{split($3, s, " "); split($1, a, " "); if (s[1] ~ /^5/) n[a[1]]++} END {for (i in n) print n[i], i}' access.log |
  LC_ALL=C sort -k1,1nr -k2,2 | head -n 5 > top_errors.txt
awk -F'"' '{split($2, q, " "); split($3, s, " ")
  if (q[1] == "GET" && q[2] ~ /^\/api\// && s[1] ~ /^2/ && s[2] != "-") sum += s[2]} END {print sum + 0}' access.log > bytes.txt
{ echo hour,requests; cut -d: -f2 access.log | sort | uniq -c | awk '{print $2 "," $1}'; } > hours.csv
