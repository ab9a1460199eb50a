cd /workspace
cat logs/auth.log.1 logs/auth.log > /tmp/auth
attacker=$(grep 'Accepted password' /tmp/auth | grep -v 'from 192\.0\.2\.' | sed 's/.* from \([0-9.]*\) .*/\1/' | head -n 1)
login=$(grep "Accepted password for .* from $attacker " /tmp/auth | head -n 1)
account=$(echo "$login" | sed 's/.* for \([^ ]*\) from .*/\1/')
when=$(echo "$login" | awk '{print $3}')
failed=$(grep 'Failed password' /tmp/auth | grep -c " from $attacker ")
added=$(grep "sudo: *$account :.*useradd" /tmp/auth | awk '{print $NF}')
bytes=$(grep "^$attacker " logs/web.log | grep '" 200 ' | awk '{print $NF}')
jq -n --arg a "$attacker" --arg u "$account" --arg t "$when" --argjson f "$failed" --arg n "$added" --argjson b "$bytes" \
  '{attacker: $a, account: $u, first_login: $t, failed_attempts: $f, new_account: $n, stolen_bytes: $b}' | tee incident.json
