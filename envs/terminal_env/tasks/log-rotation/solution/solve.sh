cd /workspace
cat > rotate.sh <<'EOF'
#!/bin/bash
# rotate.sh DIRECTORY KEEP: rotate the .log files of a directory.
if [[ $# -ne 2 || ! -d $1 || ! $2 =~ ^0*[1-9][0-9]*$ ]]; then
  echo "usage: rotate.sh DIRECTORY KEEP" >&2
  exit 2
fi
keep=$((10#$2))
shopt -s nullglob dotglob
for file in "$1"/*.log; do
  [[ -f $file && ! -L $file && -s $file ]] || continue
  highest=0
  for old in "$file".*; do
    number=${old#"$file".}
    [[ $number =~ ^[1-9][0-9]*$ ]] && ((number > highest)) && highest=$number
  done
  for ((n = highest; n >= 1; n--)); do
    [[ -e $file.$n ]] || continue
    if ((n + 1 > keep)); then rm -f -- "$file.$n"; else mv -- "$file.$n" "$file.$((n + 1))"; fi
  done
  mv -- "$file" "$file.1"
  : > "$file"
done
exit 0
EOF
bash -n rotate.sh
