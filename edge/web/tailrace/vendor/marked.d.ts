/** The part of marked's types that markdown.js uses. */

/** A block, or a part of a line. Which fields it has depends on its type. */
export interface Token {
  type: string;
  /** The source text, with the line ends that belong to it. */
  raw: string;
  text?: string;
  tokens?: Token[];
  depth?: number;
  lang?: string;
  ordered?: boolean;
  start?: number | "";
  items?: Token[];
  checked?: boolean;
  href?: string;
  align?: ("center" | "left" | "right" | null)[];
  header?: { tokens: Token[] }[];
  rows?: { tokens: Token[] }[][];
}

/** The blocks of a text, and the targets that it defines for its links. */
export function lexer(source: string): Token[] & { links: Record<string, unknown> };
