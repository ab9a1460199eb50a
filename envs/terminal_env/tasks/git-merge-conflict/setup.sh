git init -q -b main relay
cd relay
git config user.name Ben
git config user.email ben@example.org
git config gc.auto 0
at() { export GIT_AUTHOR_DATE="2026-01-0$1T09:00:00Z" GIT_COMMITTER_DATE="2026-01-0$1T09:00:00Z"; }
at 1
cat > settings.json <<'EOF'
{
  "name": "relay",
  "port": 8080,
  "timeout_s": 30,
  "retries": 2,
  "log": "info"
}
EOF
printf 'relay forwards messages.\n' > NOTES
git add . && git commit -qm 'Relay with its settings'
git checkout -qb queue
at 2
cat > settings.json <<'EOF'
{
  "name": "relay",
  "port": 8080,
  "timeout_s": 60,
  "retries": 5,
  "log": "info",
  "queue": "fast"
}
EOF
printf 'def pick(queue):\n    return queue.pop(0)\n' > queue_pick.py
git add . && git commit -qm 'Queue messages'
git checkout -q main
at 3
cat > settings.json <<'EOF'
{
  "name": "relay",
  "port": 9090,
  "timeout_s": 45,
  "retries": 2,
  "log": "info",
  "tls": true
}
EOF
printf 'relay forwards messages over TLS.\n' > NOTES
git add . && git commit -qm 'Listen with TLS'
