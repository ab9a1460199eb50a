/** What components are made with: preact and htm, in one file of their own. */
export { html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
