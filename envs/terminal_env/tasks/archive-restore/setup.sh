# A full archive and five days of changes; the one of December 5 was cut short.
mkdir backups
work=$(mktemp -d)
cd "$work"

pack() { # DAY SUFFIX NAME...: archive the named entries, directories without what is in them
  local day=$1 suffix=$2
  shift 2
  find . -exec touch -h -d "$day 06:00:00 UTC" {} +
  printf '%s\0' "$@" | LC_ALL=C sort -z |
    tar --no-recursion --null -T - --owner=0 --group=0 --numeric-owner --format=ustar -cf "$work.tar"
  case $suffix in
    *gz) gzip -n "$work.tar" ;;
    *bz2) bzip2 "$work.tar" ;;
    *xz) xz -T1 "$work.tar" ;;
  esac
  mv "$work.tar".* "/workspace/backups/$day.$suffix"
}

mkdir -p site/pages site/logs site/private site/versions/v1 bin
echo '<h1>Welcome</h1>' > site/pages/index.html
echo '<h1>About</h1>' > site/pages/about.html
echo '<h1>Old offer</h1>' > 'site/pages/old offer.html'
echo 'one' > site/versions/v1/app.js
ln -s versions/v1 site/current
ln -s ../pages/index.html site/private/home
echo 'k-5520c1' > site/private/key
echo 'level = info' > site/settings.ini
ln -s ../site/settings.ini bin/settings
printf '#!/bin/sh\necho up\n' > bin/start
printf '#!/bin/sh\necho down\n' > bin/stop
echo 'first line' > site/logs/app.log
: > site/logs/.keep
find . -type d -exec chmod 755 {} +
find . -type f -exec chmod 644 {} +
chmod 775 site/pages
chmod 700 site/private
chmod 600 site/private/key
chmod 777 site/logs
chmod 666 site/logs/app.log
chmod 755 bin/start bin/stop
mapfile -d '' everything < <(find . -mindepth 1 -printf '%P\0')
pack 2025-12-01 full.tar.gz "${everything[@]}"

mkdir site/versions/v2
echo 'two' > site/versions/v2/app.js
chmod 664 site/versions/v2/app.js
ln -sfn versions/v2 site/current
echo 'second line' >> site/logs/app.log
pack 2025-12-02 tar.xz site/versions/v2 site/versions/v2/app.js site/current site/logs/app.log

printf '%s\n' 'site/pages/old offer.html' site/versions/v1 bin/stop bin/settings > DELETED
rm bin/settings
mkdir bin/settings
echo 'level = debug' > bin/settings/local.ini
chmod 770 bin/settings
chmod 640 bin/settings/local.ini
chmod 750 bin/start
pack 2025-12-03 tar.bz2 DELETED bin/start bin/settings bin/settings/local.ini

printf '%s\n' site/private/home > DELETED
rm site/private/home
echo '<h1>At home</h1>' > site/private/home
chmod 444 site/private/home
rm site/settings.ini
ln -s private/key site/settings.ini
chmod 705 site/pages
pack 2025-12-04 tar.gz DELETED site/private/home site/settings.ini site/pages

echo 'k-9981aa' > site/private/key
printf '%s\n' site/logs/.keep > DELETED
head -c 3000 /dev/zero | tr '\0' x > site/pages/filler.html
pack 2025-12-05 tar.gz DELETED site/private/key site/pages/filler.html

printf '%s\n' bin/start > DELETED
echo '<h1>Sorry</h1>' > site/pages/index.html
pack 2025-12-06 tar.xz DELETED site/pages/index.html

cd /workspace/backups
sha256sum -- * > ../sums
mv ../sums SHA256SUMS
truncate -s -40 2025-12-05.tar.gz
rm -rf "$work"
