# The author's ~/.profile says: export REPORT_HOME=/home/ana/nightly

total() { # CATEGORY: print it with the sum of its amounts
  awk -F, "\$1 == \"$1\" {sum += \$2} END {print \"$1\", sum}"
}
