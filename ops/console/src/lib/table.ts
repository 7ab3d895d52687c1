/** A column of a table. */
export interface Column<Row> {
  /** Its name among the columns; also what the cell's snippet switches on. */
  name: string;
  title: string;
  /** Said when the pointer rests on the title. */
  hint?: string;
  /** Right-aligned, in figures of one width. */
  number?: boolean;
  /** What its rows are sorted by; none: they cannot be. */
  sort?: (row: Row) => string | number | null;
}
