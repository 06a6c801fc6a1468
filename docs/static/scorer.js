// The page of errors first, the modules' notebooks last; all other numbers are Sphinx's
var Scorer = {
  score: ([page, , , , score]) => score + (page === "nbs/troubles" ? 30 : /^nbs\/(\w+\/)?\d/.test(page) ? -30 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
