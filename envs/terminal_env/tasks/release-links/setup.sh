mkdir -p app/releases app/shared/uploads
cd app
echo 'listen = 8080' > shared/config.ini
echo 'ana.png' > shared/uploads/ana.png
echo v1.2.0 > pinned
for version in 0.9.0 1.2.0 1.9.3 1.10.0 1.10.1 1.11.0 2.0.0-rc1 2.0.0; do
  release=releases/v$version
  mkdir -p "$release/lib"
  echo "program $version" > "$release/main.py"
  echo "library $version" > "$release/lib/core.py"
  ln -s /srv/old/app/shared/config.ini "$release/config.ini"
  ln -s /srv/old/app/shared/uploads "$release/uploads"
  : > "$release/.complete"
done
rm releases/v1.11.0/.complete releases/v2.0.0/.complete
rm -r releases/v2.0.0-rc1
# A release that was used while its links were broken
rm releases/v1.10.0/uploads
mkdir releases/v1.10.0/uploads
echo 'ben.png' > releases/v1.10.0/uploads/ben.png
echo 'the plan' > 'releases/v1.10.0/uploads/the plan.txt'
echo 'hidden' > releases/v1.10.0/uploads/.thumbs
# A release with a copy of the configuration, and one whose link was right
rm releases/v1.9.3/config.ini
cp shared/config.ini releases/v1.9.3/config.ini
ln -sfn ../../shared/config.ini releases/v1.2.0/config.ini
# Links that lead nowhere, in a circle, and one that is in order
ln -s /srv/old/app/tmp releases/v1.10.1/tmp
ln -s loop-b shared/loop-a
ln -s loop-a shared/loop-b
ln -s core.py releases/v1.10.1/lib/engine.py
ln -s gone.py releases/v1.9.3/lib/extra.py
ln -s /srv/old/app/releases/v2.0.0 current
