cd /workspace/app
newest=$(for release in releases/*/.complete; do basename "$(dirname "$release")"; done | sort -rV | head -n 3)
keep=$(printf '%s\n' "$newest" "$(cat pinned)")
for release in releases/*; do
  grep -qxF "$(basename "$release")" <<< "$keep" || rm -r "$release"
done
ln -sfn "releases/$(head -n 1 <<< "$newest")" current
for release in releases/*; do
  if [ -d "$release/uploads" ] && [ ! -L "$release/uploads" ]; then
    find "$release/uploads" -mindepth 1 -exec mv -n -t shared/uploads {} +
    rmdir "$release/uploads"
  fi
  rm -f "$release/config.ini"
  ln -sfn ../../shared/config.ini "$release/config.ini"
  ln -sfn ../../shared/uploads "$release/uploads"
done
find . -type l ! -exec test -e {} \; -delete
find . -type l -printf '%p -> %l\n' | sort
