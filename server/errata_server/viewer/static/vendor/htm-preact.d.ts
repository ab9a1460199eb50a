/** The types of what the viewer uses of htm-preact.js. */
export function html(strings: TemplateStringsArray, ...values: unknown[]): any;
export function render(tree: any, parent: Element): void;
export function useState<T>(initial: T | (() => T)): [T, (next: T | ((before: T) => T)) => void];
export function useRef<T>(initial: T): { current: T };
export function useMemo<T>(make: () => T, inputs: readonly unknown[]): T;
export function useCallback<T>(callback: T, inputs: readonly unknown[]): T;
export function useEffect(effect: () => void | (() => void), inputs: readonly unknown[]): void;
export function useLayoutEffect(effect: () => void | (() => void), inputs: readonly unknown[]): void;
