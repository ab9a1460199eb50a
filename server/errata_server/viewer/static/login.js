/** Login with a token. The server answers with a cookie that no script can read; the token is kept nowhere. */

import { login } from "./api.js";
import { html, useState } from "./html.js";
import { Trouble } from "./output.js";

/** @param {{done: () => void}} properties */
export function LoginScreen({ done }) {
  const [failure, setFailure] = useState("");
  const send = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const given = new FormData(/** @type {HTMLFormElement} */ (event.currentTarget)).get("token");
    setFailure("");
    try {
      await login(String(given).trim());
      done();
    } catch (error) {
      setFailure(/** @type {Error} */ (error).message);
    }
  };
  return html`
    <main class="login">
      <h1>Login</h1>
      <p>This server shows episodes to those who have one of its tokens (ERRATA_TOKEN).</p>
      <form onSubmit=${send}>
        <label>token <input name="token" type="password" autocomplete="current-password" required autofocus /></label> <button>log in</button>
      </form>
      ${failure && html`<${Trouble} text=${failure} />`}
    </main>
  `;
}
