# A tree as careless copies leave it: everything open, nothing runs.
printf 'debug = false\n' > site/.hidden.conf
find site -type d -exec chmod 777 {} +
find site -type f -exec chmod 666 {} +
chmod 777 site/data/users.csv site/conf/app.conf
ln -s ../conf/app.conf site/bin/conf
