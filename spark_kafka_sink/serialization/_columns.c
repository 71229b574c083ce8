/* Rows of a column to bytes: checks the plan and the buffers, then writes row after row into one output.
 *
 * The output has a fixed size. A row that does not fit ends the call; the caller makes the output larger and goes on from
 * this row. So there is no allocation here, and no GIL while rows are written. All sizes are checked before the first row,
 * offsets when they are read. What does not fit is a ValueError, never a read or a write beyond a buffer.
 */
#include "_columns.h"

enum { PLAN_FIELDS = 12, BOUND_FIELDS = 4, MOST_DEPTH = 100, MOST_NODES = 1 << 20, POWERS_SIZE = 617 * 16 };
static const int64_t MOST = (int64_t)1 << 40;            /* rows */
static const int64_t MOST_OF_A_SIZE = (1 << 22) - 1; /* of a value or list of one size, so that no product overflows */

/* Bytes of an entry in the buffer of values; 0: see below. */
static const uint8_t WIDTHS[OPS] = {
    [I8] = 1,     [I16] = 2,        [I32] = 4,    [I64] = 8,     [U8] = 1,          [U16] = 2,    [U32] = 4,
    [U64] = 8,    [F16] = 2,        [F32] = 4,    [F64] = 8,     [TEXT32] = 4,      [TEXT64] = 8, [TEXT_VIEW] = 16,
    [BYTES32] = 4, [BYTES64] = 8,   [BYTES_VIEW] = 16, [LIST32] = 4, [LIST64] = 8, [MAP] = 4};

static int is_text_or_bytes(int op) { return op >= TEXT32 && op <= BYTES_FIXED; }
static int has_views(int op) { return op == TEXT_VIEW || op == BYTES_VIEW; }
static int has_offsets(int op)
{
    return op == TEXT32 || op == TEXT64 || op == BYTES32 || op == BYTES64 || op == LIST32 || op == LIST64 || op == MAP;
}

static int has_rows_of_children(int op) { return op == STRUCT || op == VARIANT; }

static int is_inside(int64_t at, int64_t size, Py_ssize_t whole) { return at >= 0 && size >= 0 && at <= whole - size; }

/* Symbols of an enum: as many as `other` says, inside of `extra`. */
static int has_symbols(const node *of)
{
    int64_t at = 0;
    for (int64_t symbol = 0; symbol < of->other; symbol++) {
        if (of->extra_size - at < 4)
            return 0;
        int64_t size = i32_at(of->extra + at, 0);
        if (size < 0 || size > of->extra_size - at - 4)
            return 0;
        at += 4 + size;
    }
    return 1;
}

/* Whether the numbers of a node are in their bounds, so that the emitters need no checks. */
static int is_possible(const node *of)
{
    if (of->op < 0 || of->op >= OPS || of->null_branch > 63 || of->value_branch > 63)
        return 0;
    switch (of->op) {
    case LIST32:
    case LIST64: return of->count == 1;
    case MAP: return of->count == 2;
    case VARIANT: return of->count == 2 && of->arg > 0 && of->extra_size % 16 == 0;
    case LIST_FIXED: return of->count == 1 && of->arg >= 0 && of->arg <= MOST_OF_A_SIZE;
    case DICT: return of->count == 1 && (of->arg == 1 || of->arg == 2 || of->arg == 4 || of->arg == 8);
    case DECIMAL:
        if ((of->arg != 4 && of->arg != 8 && of->arg != 16) || of->other < -200 || of->other > 100)
            return 0;
        return of->extra_size == 0 || of->extra_size == 16;
    case BYTES_FIXED:
        if (of->arg < 0 || of->arg > MOST_OF_A_SIZE)
            return 0;
        break;
    default: break;
    }
    if (is_text_or_bytes(of->op))
        return of->how != SYMBOL || has_symbols(of);
    int has_no_unit = of->op == STRUCT || of->op == ABSENT || of->op == F16 || of->op == F32 || of->op == F64;
    return of->how == PLAIN || has_no_unit || (of->arg > 0 && of->extra_size % 16 == 0);
}

/* Fills a node from its numbers in the plan. */
static int read_node(node *nodes, int64_t index, int64_t count, const uint8_t *plan, const Py_buffer *pool)
{
    node *of = nodes + index;
    int64_t numbers[PLAN_FIELDS];
    memcpy(numbers, plan + 8 * PLAN_FIELDS * index, sizeof numbers);
    of->op = (int)numbers[0];
    of->how = (int)numbers[1];
    of->null_branch = (int)numbers[2];
    of->value_branch = (int)numbers[3];
    of->count = numbers[5];
    of->arg = numbers[6];
    of->other = numbers[7];
    if (of->count < 0 || (of->count > 0 && (numbers[4] <= index || numbers[4] > count - of->count)) || of->depth > MOST_DEPTH)
        return 0;
    of->children = nodes + (of->count > 0 ? numbers[4] : 0);
    for (int64_t child = 0; child < of->count; child++)
        nodes[numbers[4] + child].depth = of->depth + 1;
    if (!is_inside(numbers[8], numbers[9], pool->len) || !is_inside(numbers[10], numbers[11], pool->len))
        return 0;
    of->name = (const uint8_t *)pool->buf + numbers[8];
    of->name_size = numbers[9];
    of->extra = (const uint8_t *)pool->buf + numbers[10];
    of->extra_size = numbers[11];
    return is_possible(of);
}

/* Whether a node's buffers hold all its rows. `offset`: of row 0. */
static int take_buffers(node *of, int64_t offset, const Py_buffer *buffers, int64_t count)
{
    int64_t end = offset + of->length, width = WIDTHS[of->op];
    if (of->op == ABSENT)
        return 1;
    if (count < 1 || (buffers[0].buf != NULL && buffers[0].len < (end + 7) / 8))
        return 0;
    of->valid = buffers[0].buf;
    of->bit = of->first = offset;
    if (has_rows_of_children(of->op) || of->op == LIST_FIXED || of->length == 0)
        return 1;
    if (of->op == BYTES_FIXED || of->op == DECIMAL || of->op == DICT)
        width = of->arg;
    int64_t entries = end + has_offsets(of->op);
    if (count < 2 || buffers[1].len < (of->op == BOOL ? (end + 7) / 8 : entries * width))
        return 0;
    if (buffers[1].buf == NULL && width > 0)
        return 0;
    of->values = buffers[1].buf;
    if (of->values != NULL && of->op != BOOL)
        of->values += offset * width;
    if (has_views(of->op)) {
        of->views = buffers + 2;
        of->view_count = count - 2;
    } else if (count > 2) {
        of->data = buffers[2].buf;
        of->data_size = buffers[2].len;
    }
    return 1;
}

/* Whether the node can be a part of a variant: bytes, or a dictionary of them. */
static int is_bytes(const node *of)
{
    while (of->op == DICT)
        of = of->children;
    return of->op >= BYTES32 && of->op <= BYTES_FIXED;
}

/* Whether the children of a struct or of lists of one size have all rows that their parent needs. */
static int has_children(const node *of)
{
    if (of->op == VARIANT && !(is_bytes(of->children) && is_bytes(of->children + 1)))
        return 0;
    int64_t needed = has_rows_of_children(of->op) ? of->length : of->op == LIST_FIXED ? (of->first + of->length) * of->arg : 0;
    for (int64_t child = 0; child < of->count; child++)
        if (of->children[child].length < needed && of->children[child].op != ABSENT)
            return 0;
    return 1;
}

typedef struct {
    Py_buffer plan, pool, bound, prefix, powers, out, offsets, valid, bad;
} views;

/* Fills all nodes. `buffers`: of all nodes, `given` of them. Raises ValueError. Only the emitter of JSON knows variants. */
static int bind(put_value *put, node *nodes, int64_t count, const views *with, const Py_buffer *buffers, int64_t given)
{
    for (int64_t index = 0; index < count; index++) {
        int64_t numbers[BOUND_FIELDS];
        memcpy(numbers, (const uint8_t *)with->bound.buf + 8 * BOUND_FIELDS * index, sizeof numbers);
        int64_t length = numbers[0], offset = numbers[1], first = numbers[2], own = numbers[3];
        if (!read_node(nodes, index, count, with->plan.buf, &with->pool) || (nodes[index].op == VARIANT && put != put_json)) {
            PyErr_Format(PyExc_ValueError, "node %lld of the plan is not possible", (long long)index);
            return 0;
        }
        nodes[index].length = length;
        if (length < 0 || length > MOST || offset < 0 || offset > MOST || !is_inside(first, own, (Py_ssize_t)given)
            || !take_buffers(nodes + index, offset, buffers + first, own)) {
            PyErr_Format(PyExc_ValueError, "the buffers of node %lld do not hold its rows", (long long)index);
            return 0;
        }
    }
    for (int64_t index = 0; index < count; index++)
        if (!has_children(nodes + index)) {
            PyErr_Format(PyExc_ValueError, "a child of node %lld has fewer rows, or another type", (long long)index);
            return 0;
        }
    return 1;
}

typedef struct {
    int64_t row, last, used, bad, most_bad;
    int is_full, is_corrupt;
} progress;

/* Writes rows until the last, until the output is full or until the list of bad rows is. */
static void write_rows(put_value *put, writer *to, const node *nodes, const views *with, progress *of)
{
    uint8_t *out = with->out.buf, *valid = with->valid.buf, *offsets = with->offsets.buf;
    const Py_ssize_t prefix = with->prefix.len;
    for (; of->row < of->last; of->row++) {
        uint8_t *at = out + of->used;
        const node *root = nodes;
        int64_t place = of->row;
        int is_there = found(&root, &place);
        if (is_there > 0) {
            if (to->end - at < prefix + ROOM) {
                of->is_full = 1;
                return;
            }
            memcpy(at, with->prefix.buf, (size_t)prefix);
            at = put(to, nodes, of->row, at + prefix);
            if (at != NULL) {
                of->used = at - out;
                valid[of->row >> 3] |= (uint8_t)(1 << (of->row & 7));
            } else if (to->code == FULL) {
                of->is_full = 1;
                return;
            } else if (to->code == CORRUPT) {
                of->is_corrupt = 1;
                return;
            } else {
                if (of->bad == of->most_bad)
                    return;
                int64_t entry[3] = {of->row, to->at - nodes, to->code};
                memcpy((uint8_t *)with->bad.buf + sizeof entry * (size_t)of->bad++, entry, sizeof entry);
            }
        } else if (is_there < 0) {
            of->is_corrupt = 1;
            return;
        }
        int32_t end = (int32_t)of->used;
        memcpy(offsets + 4 * (of->row + 1), &end, sizeof end);
    }
}

/* Whether the sizes of what was handed over fit together. */
static int fits(const views *with, int64_t nodes, const progress *of)
{
    return nodes > 0 && nodes <= MOST_NODES && with->bound.len == 8 * BOUND_FIELDS * nodes && of->row >= 0
           && of->last >= of->row && of->last <= MOST && with->offsets.len >= 4 * (of->last + 1)
           && with->valid.len >= (of->last + 7) / 8 && of->used >= 0 && of->used <= with->out.len
           && with->out.len <= INT32_MAX && with->powers.len == POWERS_SIZE && of->bad >= 0 && of->bad <= of->most_bad;
}

static int take_views(PyObject *const *objects, Py_buffer *buffers, Py_ssize_t count, Py_ssize_t writable)
{
    for (Py_ssize_t index = 0; index < count; index++) {
        int flags = index >= writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (objects[index] == Py_None)
            memset(buffers + index, 0, sizeof *buffers);
        else if (PyObject_GetBuffer(objects[index], buffers + index, flags) < 0) {
            while (index-- > 0)
                PyBuffer_Release(buffers + index);
            return 0;
        }
    }
    return 1;
}

static void release_views(Py_buffer *buffers, Py_ssize_t count)
{
    while (count-- > 0)
        if (buffers[count].obj != NULL)
            PyBuffer_Release(buffers + count);
}

static PyObject *write_bound(put_value *put, const views *with, const Py_buffer *buffers, int64_t given, progress *of)
{
    int64_t count = with->plan.len / (8 * PLAN_FIELDS);
    of->most_bad = with->bad.len / 24;
    if (!fits(with, count, of)) {
        PyErr_SetString(PyExc_ValueError, "a size is out of bounds");
        return NULL;
    }
    node *nodes = PyMem_Calloc((size_t)count, sizeof *nodes);
    if (nodes == NULL)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    if (bind(put, nodes, count, with, buffers, given)) {
        if (of->last > nodes->length)
            PyErr_SetString(PyExc_ValueError, "the column has fewer rows");
        else {
            writer to = {.end = (const uint8_t *)with->out.buf + with->out.len, .powers = with->powers.buf};
            Py_BEGIN_ALLOW_THREADS
            write_rows(put, &to, nodes, with, of);
            Py_END_ALLOW_THREADS
            if (of->is_corrupt)
                PyErr_SetString(PyExc_ValueError, "an offset or an index of the column is outside of its buffer");
            else
                result = Py_BuildValue("LLLO", (long long)of->row, (long long)of->used, (long long)of->bad,
                                       of->is_full ? Py_True : Py_False);
        }
    }
    PyMem_Free(nodes);
    return result;
}

/* By the number of the form, as in column_encoder.py. */
static put_value *const EMITTERS[] = {put_avro, put_json, put_protobuf};

static PyObject *encode_rows(PyObject *module, PyObject *arguments)
{
    enum { OWN = sizeof(views) / sizeof(Py_buffer) };
    PyObject *objects[OWN], *given;
    int form;
    long long row, last, used;
    if (!PyArg_ParseTuple(arguments, "iOOOO!LLOOOLOOO", &form, &objects[0], &objects[1], &objects[2], &PyTuple_Type, &given,
                          &row, &last, &objects[3], &objects[4], &objects[5], &used, &objects[6], &objects[7],
                          &objects[8]))
        return NULL;
    if (form < 0 || form >= (int)(sizeof EMITTERS / sizeof *EMITTERS)) {
        PyErr_SetString(PyExc_ValueError, "there is no such form");
        return NULL;
    }
    views with;
    const Py_ssize_t writable = &with.out - &with.plan;
    if (!take_views(objects, (Py_buffer *)&with, OWN, writable))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = PyTuple_Size(given);
    Py_buffer *buffers = PyMem_Calloc((size_t)count + 1, sizeof *buffers);
    PyObject **items = PyMem_Calloc((size_t)count + 1, sizeof *items);
    if (buffers == NULL || items == NULL)
        PyErr_NoMemory();
    else {
        for (Py_ssize_t index = 0; index < count; index++)
            items[index] = PyTuple_GetItem(given, index);
        if (take_views(items, buffers, count, count)) {
            progress of = {.row = row, .last = last, .used = used};
            result = write_bound(EMITTERS[form], &with, buffers, (int64_t)count, &of);
            release_views(buffers, count);
        }
    }
    PyMem_Free(items);
    PyMem_Free(buffers);
    release_views((Py_buffer *)&with, OWN);
    return result;
}

static PyMethodDef methods[] = {
    {"encode_rows", encode_rows, METH_VARARGS, "Write the rows of a column in a form. See column_encoder.py."},
    {NULL, NULL, 0, NULL},
};

int add_encode_rows(PyObject *module) { return PyModule_AddFunctions(module, methods); }
