cd /workspace
mkdir restored
for archive in backups/*.tar.*; do
  name=${archive##*/}
  (cd backups && grep -F "  $name" SHA256SUMS | sha256sum --check --status) || break
  if tar -tf "$archive" | grep -qx DELETED; then
    tar -xOf "$archive" DELETED | while IFS= read -r gone; do rm -rf "restored/$gone"; done
  fi
  tar -xpf "$archive" -C restored --exclude=DELETED
  echo "${name%%.*}" > restored_day.txt
done
cat restored_day.txt
