cd /workspace/site
find . -type f -exec chmod 640 {} +
find . -type f -name '*.sh' -exec chmod 750 {} +
find conf/secrets -type f -exec chmod 600 {} +
find . -depth -type d -exec chmod 750 {} +
